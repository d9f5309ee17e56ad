"""Facts of devices: accelerators, EFA, disks."""
