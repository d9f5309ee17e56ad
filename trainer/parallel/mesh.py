"""How a job's ranks are arranged: replicas of the model, and the shards of each replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lustrain.problem import problem
from trainer.config import ParallelConfig
from trainer.parallel.shards import Axis
from trainer.parallel.world import World


@dataclass(frozen=True)
class ParallelDims:
    """The device mesh as numbers: `replicate` x `shard` ranks, and this rank among them.

    Ranks of one replica are neighbours, so that shards are exchanged within a node where it is large enough.
    """

    replicate: int
    shard: int
    rank: int

    @classmethod
    def of(cls, config: ParallelConfig, world: World) -> ParallelDims:
        """Return the mesh of a job for which `mesh_problems` has nothing to say."""
        shard = config.shard or world.world_size
        return cls(world.world_size // shard, shard, world.rank)

    @property
    def data_rank(self) -> int:
        """This rank's number among those that take their own batches: all of them, sharded or not."""
        return self.rank

    @property
    def data_size(self) -> int:
        """How many ranks take batches of their own."""
        return self.replicate * self.shard

    @property
    def shard_rank(self) -> int:
        """Which shard of each parameter this rank holds."""
        return self.rank % self.shard

    @property
    def axes(self) -> Sequence[Axis]:
        """The mesh with this rank's place in it."""
        return (
            Axis("replicate", self.replicate, self.rank // self.shard),
            Axis("shard", self.shard, self.shard_rank),
        )

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """Make the process groups that sharding needs; every rank calls it at the same time."""
        if self.replicate == 1:
            return init_device_mesh(device.type, (self.shard,), mesh_dim_names=("shard",))
        return init_device_mesh(device.type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))


def mesh_problems(config: ParallelConfig, world_size: int) -> Sequence[str]:
    """Return one line for each part of the mesh that this number of ranks cannot make."""
    shard = config.shard or world_size
    if world_size % shard:
        allowed = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        why = f"does not divide the {world_size} ranks"
        fix = "another number of ranks, or another value"
        return [problem("parallel.shard", shard, why, allowed=f"0, {allowed}", fix=fix)]
    return []
