"""Plans of the VPC, its endpoints and its security groups."""
