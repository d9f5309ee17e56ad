"""Settings of NVIDIA GPUs."""
