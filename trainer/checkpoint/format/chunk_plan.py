"""The chunks of each tensor that each rank stores, and their offsets: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from trainer.checkpoint.format.records import ALIGN, Entry


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


def plan_chunks(
    replicated: Sequence[TensorMeta], per_rank: Sequence[TensorMeta], rank: int, world_size: int
) -> tuple[Entry, ...]:
    """Plan one rank's data object: its entries in the order of their offsets, each start a multiple of ALIGN.

    `replicated` tensors are cut over the ranks by bytes, on boundaries of the first dimension that is longer than one:
    together the ranks store each row once, and no rank is more than one row away from its even share. `per_rank` tensors
    stay whole. Raises ValueError when a name occurs twice.
    """
    names = [shape.name for shape in (*replicated, *per_rank)]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tensor names must be unique: {', '.join(twice)}")
    return tuple(_placed([*_cut_rows(replicated, rank, world_size), *map(_whole, _by_name(per_rank))]))


def data_size(entries: Sequence[Entry]) -> int:
    """Return the bytes of the data object that holds these entries."""
    return entries[-1].start + entries[-1].size if entries else 0


def _cut_rows(replicated: Sequence[TensorMeta], rank: int, world_size: int) -> Iterator[Entry]:
    total = sum(shape.size for shape in replicated)
    begin, end = rank * total // world_size, (rank + 1) * total // world_size
    offset = 0
    for shape in _by_name(replicated):
        if shape.size:
            first, last = _row_at(shape, begin - offset), _row_at(shape, end - offset)
            if first < last:
                yield _rows(shape, first, last)
        elif begin <= offset < end or (offset == total and rank == world_size - 1):
            yield _whole(shape)
        offset += shape.size


def _row_at(shape: TensorMeta, byte: int) -> int:
    """Return the row boundary nearest to a byte of the tensor; both neighbours of a cut compute the same one."""
    rows = shape.shape[_cut_dimension(shape)] if shape.shape else 1
    row_bytes = shape.size // rows
    return min(max((2 * byte + row_bytes) // (2 * row_bytes), 0), rows)


def _cut_dimension(shape: TensorMeta) -> int:
    """Return the first dimension longer than 1, else 0: leading dimensions of length 1 do not break up the bytes."""
    return next((at for at, length in enumerate(shape.shape) if length > 1), 0)


def _rows(shape: TensorMeta, first: int, last: int) -> Entry:
    if not shape.shape:
        return _whole(shape)
    at = _cut_dimension(shape)
    offsets = tuple(first if dim == at else 0 for dim in range(len(shape.shape)))
    lengths = (*shape.shape[:at], last - first, *shape.shape[at + 1 :])
    return Entry(shape.name, shape.dtype, shape.shape, offsets, lengths, 0, prod(lengths) * shape.item_bytes)


def _whole(shape: TensorMeta) -> Entry:
    return Entry(shape.name, shape.dtype, shape.shape, (0,) * len(shape.shape), shape.shape, 0, shape.size)


def _placed(entries: Iterable[Entry]) -> Iterator[Entry]:
    start = 0
    for entry in entries:
        yield Entry(entry.name, entry.dtype, entry.shape, entry.offsets, entry.lengths, start, entry.size)
        start += -(-entry.size // ALIGN) * ALIGN


def _by_name(shapes: Sequence[TensorMeta]) -> list[TensorMeta]:
    return sorted(shapes, key=lambda shape: shape.name)
