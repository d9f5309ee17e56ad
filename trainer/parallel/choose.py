"""The strategy of a config: FSDP2 where parameters are sharded, else DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.problem import problem
from trainer.config import Config, ParallelConfig
from trainer.parallel import ddp
from trainer.parallel.mesh import ParallelDims, mesh_problems
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World

DDP_ONLY = ("bucket_mb", "gradient_as_bucket_view", "static_graph", "comm_hook")
FSDP_ONLY = ("reshard",)


def choose_strategy(config: Config, world: World) -> Strategy:
    """Return the strategy of a config for which `problems` has nothing to say; makes process groups where it shards."""
    dims = ParallelDims.of(config.parallel, world)
    if dims.shard == 1:
        return ddp.Replicated(config.parallel, world, dims)
    # Only sharding needs this import, which takes most of a second.
    from trainer.parallel.fsdp import Sharded

    return Sharded(config.parallel, config.precision, world, dims)


def problems(config: Config, world: World) -> Sequence[str]:
    """Return one line for each setting of `parallel` that cannot be used with so many ranks, on this device."""
    lines = mesh_problems(config.parallel, world.world_size)
    if lines:
        return lines
    if config.parallel.shard == 1:
        return [*unused(config.parallel, FSDP_ONLY, "FSDP2"), *ddp.problems(config.parallel, device=world.device)]
    return unused(config.parallel, DDP_ONLY, "DistributedDataParallel")


def unused(config: ParallelConfig, keys: Sequence[str], owner: str) -> Sequence[str]:
    """Return one line for each of these settings that is set although `owner` is not what `parallel.shard` chooses."""
    defaults = ParallelConfig()
    why = f"belongs to {owner}, which parallel.shard = {config.shard} does not use"
    return [
        problem(f"parallel.{key}", getattr(config, key), why, fix="leave it out")
        for key in keys
        if getattr(config, key) != getattr(defaults, key)
    ]
