"""The strategy of a config: FSDP2 where ranks share a model's parameters, else DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.problem import problem
from trainer.config import Config
from trainer.parallel import ddp
from trainer.parallel.mesh import ParallelDims, mesh_problems
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World


def choose_strategy(config: Config, world: World) -> Strategy:
    """Return the strategy of a config for which `problems` has nothing to say; makes process groups where it shards."""
    dims = ParallelDims.of(config.parallel, world)
    if dims.replica_size == 1:
        return ddp.Replicated(config.parallel, world, dims)
    # Only shards and tensor ranks need this import, which takes most of a second.
    from trainer.parallel.fsdp import Sharded

    return Sharded(config.parallel, config.precision, world, dims)


def problems(config: Config, world: World) -> Sequence[str]:
    """Return one line for each setting of `parallel` that cannot be used with so many ranks, on this device."""
    lines = mesh_problems(config.parallel, world.world_size)
    if lines:
        return lines
    lines = [*config.parallel.unused()]
    if config.parallel.tensor > 1 and config.train.compile:
        why = (
            f"torch.compile fails in the backward pass of layers that parallel.tensor = {config.parallel.tensor} splits"
        )
        lines.append(problem("train.compile", "true", why, allowed="false", fix="leave one of them out"))
    return lines or ([] if config.parallel.uses_fsdp else ddp.problems(config.parallel, device=world.device))
