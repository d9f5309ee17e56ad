"""Ownership of a run, which of its checkpoints count, and what may be removed."""
