"""Resource limits of sessions and of slurmd."""
