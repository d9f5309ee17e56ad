"""Settings of Lustre clients."""
