"""Ranks working together: who they are (`world`), how gradients are averaged (`ddp`), one exchange of numbers per step, and
decisions that all ranks take alike without a collective (`agree`, from `votes`)."""

from trainer.parallel.ddp import accumulate, problems, settle_buckets, wrap_ddp
from trainer.parallel.world import World, all_reduce_stats, join

__all__ = ["World", "accumulate", "all_reduce_stats", "join", "problems", "settle_buckets", "wrap_ddp"]
