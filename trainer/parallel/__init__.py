"""Ranks working together: who they are (`world`), how they share the model (`strategy`), one exchange a step."""

from trainer.parallel.world import World, all_reduce_stats, join

__all__ = ["World", "all_reduce_stats", "join"]
