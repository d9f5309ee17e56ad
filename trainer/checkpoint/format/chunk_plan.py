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

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.lengths) * self.tensor.item_bytes


def plan_chunks(held: Sequence[HeldChunk]) -> tuple[Entry, ...]:
    """Plan one rank's data object: its entries in the order of their offsets, each start a multiple of ALIGN.

    The ranks that hold the same chunks cut these by bytes, on boundaries of the first dimension that is longer than one:
    together they store each row once, and none of them is more than one row away from its even share. What has the most
    replicas comes first, so that small tensors, which sharding replicates, lie together in a reader's block. Raises ValueError
    when a name occurs twice.
    """
    names = [chunk.tensor.name for chunk in held]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tensor names must be unique: {', '.join(twice)}")
    groups: dict[tuple[int, tuple[str, ...]], list[HeldChunk]] = {}
    for chunk in sorted(held, key=lambda chunk: chunk.tensor.name):
        # The axes tell groups apart that have as many replicas on other ranks: each has to be cut alike on all of its own.
        groups.setdefault((-chunk.replicas, chunk.replica_axes), []).append(chunk)
    return tuple(_placed(entry for _, group in sorted(groups.items()) for entry in _cut_rows(group)))


def data_size(entries: Sequence[Entry]) -> int:
    """Return the bytes of the data object that holds these entries."""
    return entries[-1].start + entries[-1].size if entries else 0


def _cut_rows(group: Sequence[HeldChunk]) -> Iterator[Entry]:
    """Cut chunks that the same ranks hold, in name order; yield this rank's rows of each."""
    replica, replicas = group[0].replica, group[0].replicas
    total = sum(chunk.size for chunk in group)
    begin, end = replica * total // replicas, (replica + 1) * total // replicas
    offset = 0
    for chunk in group:
        if chunk.size:
            first, last = _row_at(chunk, begin - offset), _row_at(chunk, end - offset)
            if first < last:
                yield _rows(chunk, first, last)
        elif not chunk.tensor.size and (begin <= offset < end or (offset == total and replica == replicas - 1)):
            # A tensor without elements is stored too, so that a reader finds its name; a shard without elements is not.
            yield _rows(chunk, 0, 0)
        offset += chunk.size


def _row_at(chunk: HeldChunk, byte: int) -> int:
    """Return the row boundary nearest to a byte of the chunk; both neighbours of a cut compute the same one."""
    rows = chunk.lengths[_cut_dimension(chunk)] if chunk.lengths else 1
    row_bytes = chunk.size // rows
    return min(max((2 * byte + row_bytes) // (2 * row_bytes), 0), rows)


def _cut_dimension(chunk: HeldChunk) -> int:
    """Return the first dimension longer than 1, else 0: leading dimensions of length 1 do not break up the bytes."""
    return next((at for at, length in enumerate(chunk.lengths) if length > 1), 0)


def _rows(chunk: HeldChunk, first: int, last: int) -> Entry:
    offsets, lengths = list(chunk.offsets), list(chunk.lengths)
    if chunk.size and lengths:
        at = _cut_dimension(chunk)
        offsets[at], lengths[at] = offsets[at] + first, last - first
    meta = chunk.tensor
    return Entry(meta.name, meta.dtype, meta.shape, tuple(offsets), tuple(lengths), 0, prod(lengths) * meta.item_bytes)


def _placed(entries: Iterable[Entry]) -> Iterator[Entry]:
    start = 0
    for entry in entries:
        yield Entry(entry.name, entry.dtype, entry.shape, entry.offsets, entry.lengths, start, entry.size)
        start += -(-entry.size // ALIGN) * ALIGN
