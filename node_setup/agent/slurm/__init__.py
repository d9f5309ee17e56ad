"""Slurm on this node: what of it is there, and how it is brought to the state that `fab slurm-up` plans."""
