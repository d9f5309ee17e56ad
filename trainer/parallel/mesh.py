"""How a job's ranks are arranged: replicas of the model, the shards of each replica, and ranks that compute together."""

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
    """The device mesh as numbers: `replicate` x `shard` x `tensor` ranks, and this rank among them.

    Ranks of one replica are neighbours, and within it those that split each matrix product: what is exchanged most often is
    exchanged within a node where it is large enough.
    """

    replicate: int
    shard: int
    rank: int
    tensor: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, world: World) -> ParallelDims:
        """Return the mesh of a job for which `mesh_problems` has nothing to say."""
        shard = config.shard or world.world_size // config.tensor
        return cls(world.world_size // (shard * config.tensor), shard, world.rank, config.tensor)

    @property
    def data_rank(self) -> int:
        """This rank's number among those that take their own batches; the `tensor` ranks of a group take the same ones."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """How many batches are taken at once."""
        return self.replicate * self.shard

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those that compute the same micro-batch together."""
        return self.rank % self.tensor

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.shard * self.tensor

    @property
    def axes(self) -> Sequence[Axis]:
        """The mesh with this rank's place in it; without tensor parallelism there is no such axis."""
        axes = [
            Axis("replicate", self.replicate, self.rank // self.replica_size),
            Axis("shard", self.shard, self.data_rank % self.shard),
        ]
        return axes if self.tensor == 1 else [*axes, Axis("tensor", self.tensor, self.tensor_rank)]

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """Make the process groups that sharding needs; every rank calls it at the same time."""
        axes = [axis for axis in self.axes if axis.name != "replicate" or axis.size > 1]
        names = tuple(axis.name for axis in axes)
        return init_device_mesh(device.type, tuple(axis.size for axis in axes), mesh_dim_names=names)


def mesh_problems(config: ParallelConfig, world_size: int) -> Sequence[str]:
    """Return one line for each part of the mesh that this number of ranks cannot make."""
    fix = "another number of ranks, or another value"
    if world_size % config.tensor:
        why, allowed = f"does not divide the {world_size} ranks", _divisors(world_size)
        return [problem("parallel.tensor", config.tensor, why, allowed=allowed, fix=fix)]
    groups = world_size // config.tensor
    if groups % (config.shard or groups):
        why = f"does not divide the {world_size} ranks"
        if config.tensor > 1:
            why = f"does not divide the {groups} groups of parallel.tensor = {config.tensor} among {world_size} ranks"
        return [problem("parallel.shard", config.shard, why, allowed=f"0, {_divisors(groups)}", fix=fix)]
    return []


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
