"""Settings of the kernel and its modules."""
