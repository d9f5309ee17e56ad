"""Settings of instance-store disks."""
