"""Ways to divide a model over GPUs, and which of them a number of GPUs allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
            return "TP" if self.data_ranks == 1 else f"TP+{self._kind_of_data_ranks}"
        return self._kind_of_data_ranks if self.shard > 1 else "DDP"

    @property
    def _kind_of_data_ranks(self) -> str:
        if self.replicate == 1:
            return "FSDP2"
        return "HSDP" if self.shard > 1 else "DDP"

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 averages gradients, as the trainer does it with tensor ranks too."""
        return self.shard > 1 or self.tensor > 1

    @property
    def data_ranks(self) -> int:
        """How many take micro-batches of their own; GPUs of one tensor-parallel group share theirs."""
        return self.replicate * self.shard

    @property
    def settings(self) -> dict[str, object]:
        """Settings of the trainer that choose it."""
        tensor = {"parallel.tensor": self.tensor} if self.tensor > 1 else {}
        # 0 stands for all, so that the setting holds on other numbers of nodes too.
        shard = 0 if self.shard > 1 and self.replicate == 1 else self.shard
        return {"parallel.shard": shard, **tensor, "train.activation_checkpointing": self.recompute}


def strategies(
    nodes: int, gpus_per_node: int, *, split: Callable[[int], bool], shard: int = 1, tensor: int = 1
) -> Iterator[Strategy]:
    """Yield what `nodes` can run, each with and without recomputation.

    The model is sharded over a node, over all GPUs, or split over the tensor ranks of a node where it can be `split` over so
    many. `shard` and `tensor` make a further mesh where the GPUs can be so arranged.
    """
    gpus = nodes * gpus_per_node
    meshes = {(1, 1), (gpus_per_node, 1), (gpus, 1), (nodes, gpus_per_node), (shard, tensor)}
    for tensor_ranks, shards in sorted((ranks, shards) for shards, ranks in meshes):
        if gpus % (shards * tensor_ranks) == 0 and (tensor_ranks == 1 or split(tensor_ranks)):
            for recompute in RECOMPUTE:
                yield Strategy(gpus // (shards * tensor_ranks), shards, tensor_ranks, recompute)
