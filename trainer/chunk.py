"""The chunk of a tensor that a rank holds, without its data: meshes cut it, saves share it out. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class TensorMeta:
    """A named tensor without its data: `dtype` is torch's name without `torch.`, `item_bytes` one element's size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class HeldChunk:
    """The chunk of a tensor that a rank has in memory: `lengths` elements from `offsets` on.

    Ranks that differ in their place along `replica_axes` of the device mesh only hold the same chunk, and share out its rows;
    `replica` counts them, of `replicas`.
    """

    tensor: TensorMeta
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    replica_axes: tuple[str, ...]
    replica: int
    replicas: int
    cuts: tuple[tuple[int, str], ...] = ()
    """(dimension, axis) of each cut of the whole tensor, in their order."""

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.lengths) * self.tensor.item_bytes
