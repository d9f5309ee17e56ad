"""EKS control planes, access and add-ons."""
