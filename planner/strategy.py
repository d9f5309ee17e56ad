"""Ways to divide a model over GPUs, and which of them a number of GPUs allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from planner.work import Recompute

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Strategy:
    """`replicate` x `shard` x `tensor` GPUs; `recompute` as `train.activation_checkpointing`."""

    replicate: int
    shard: int
    tensor: int = 1
    recompute: Recompute = "none"

    @property
    def kind(self) -> str:
        if self.tensor > 1:
            return "TP" if self.shard == self.replicate == 1 else "TP+FSDP2"
        if self.shard == 1:
            return "DDP"
        return "FSDP2" if self.replicate == 1 else "HSDP"

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data_ranks(self) -> int:
        """How many take micro-batches of their own; GPUs of one tensor-parallel group share theirs."""
        return self.replicate * self.shard

    @property
    def in_trainer(self) -> bool:
        """Whether this trainer can run it: tensor parallelism is planned only."""
        return self.tensor == 1

    @property
    def settings(self) -> dict[str, object]:
        """Settings of the trainer that choose it."""
        return {"parallel.shard": self.shard, "train.activation_checkpointing": self.recompute}


def strategies(nodes: int, gpus_per_node: int, *, heads: int = 0, shard: int = 0) -> Iterator[Strategy]:
    """Yield what `nodes` can run, each with and without recomputation.

    Tensor parallelism stays within a node and divides the key/value `heads`; 0 leaves it out. `shard` is a further number of
    shards beside those of a node and of all GPUs, where it divides them.
    """
    gpus = nodes * gpus_per_node
    shards = {1, gpus_per_node, gpus} | ({shard} if shard and gpus % shard == 0 else set())
    meshes = [(gpus // each, each, 1) for each in sorted(shards)]
    if heads and gpus_per_node > 1 and heads % gpus_per_node == 0:
        meshes.append((1, nodes, gpus_per_node))
    for replicate, shard_size, tensor in meshes:
        for recompute in RECOMPUTE:
            yield Strategy(replicate, shard_size, tensor, recompute)
