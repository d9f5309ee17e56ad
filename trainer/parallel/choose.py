"""The strategy of a config: FSDP2 where parameters are sharded, else DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config import Config
from trainer.parallel import ddp
from trainer.parallel.mesh import ParallelDims, mesh_problems
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World


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
    unused = config.parallel.unused()
    return unused or ([] if config.parallel.shard != 1 else ddp.problems(config.parallel, device=world.device))
