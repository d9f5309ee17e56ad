"""Ranks working together: who they are (`world`), how they share the model (`strategy`), one exchange of numbers per step,
and decisions that all ranks take alike without a collective (`agree`, from `votes`)."""

from trainer.parallel.world import World, all_reduce_stats, join

__all__ = ["World", "all_reduce_stats", "join"]
