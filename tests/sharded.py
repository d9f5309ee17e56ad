"""Ranks of which one is here, so that tensors and models are really sharded without other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.tasks.models import llama


@contextmanager
def first_of(ranks: int) -> Iterator[None]:
    """Be rank 0 of so many, in a process group whose exchanges do nothing, and which ends with the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def mesh_of_two() -> Iterator[DeviceMesh]:
    """A mesh of the first of two ranks."""
    with first_of(2):
        yield init_device_mesh("cpu", (2,))


def shard_on(mesh: DeviceMesh) -> DTensor:
    """The first half of a tensor that is cut by rows."""
    return distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])


class LlamaSource:
    """The part of a Task that makes a Llama, without data."""

    def __init__(self, shape: llama.LlamaShape, length: int = 8) -> None:
        self.shape, self.length = shape, length

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def empty_model(self) -> nn.Module:
        return llama.empty(self.shape, length=self.length)

    def initialise(self, model: nn.Module) -> None:
        """Leave the weights as they are: memory that is not written takes none."""

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    def embeddings(self, model: Any) -> list[nn.Module]:
        return llama.embeddings(model)

    def tensor_plan(self, model: Any) -> Any:
        return llama.tensor_plan(model)
