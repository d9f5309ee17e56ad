"""The chunks of each tensor that each rank stores, and their offsets: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from trainer.checkpoint.format.records import (
    ALIGN,
    BLOCK_BYTES,
    Entry,
    MeshAxis,
    MeshLayout,
    StoredTensor,
    TensorGroup,
)
from trainer.chunk import HeldChunk


def plan_chunks(held: Sequence[HeldChunk], *, sharded: bool = False) -> tuple[Entry, ...]:
    """Plan one rank's data object: its entries in the order of their offsets, each start a multiple of ALIGN.

    The ranks that hold the same chunks cut these by bytes, on boundaries of the first dimension that is longer than one:
    together they store each row once, and none of them is more than one row away from its even share.

    In a `sharded` run a reader wants few parts and few blocks. So where that would be less than a block each, the first of
    these ranks alone store the chunks, and store them last: a reader gets few other bytes with them. Raises ValueError when a
    name occurs twice.
    """
    names = [chunk.tensor.name for chunk in held]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tensor names must be unique: {', '.join(twice)}")
    first: list[Entry] = []
    last: list[Entry] = []
    for group in _groups(held):
        storing = _storing(group) if sharded else group[0].replicas
        (first if storing == group[0].replicas else last).extend(_cut_rows(group, storing))
    entries = tuple(_placed(first, 0))
    end = data_size(entries)
    # The block that both would share is read for the sake of either: at most half of it is others' or empty.
    boundary = BLOCK_BYTES if end % BLOCK_BYTES > BLOCK_BYTES // 2 else ALIGN
    return (*entries, *_placed(last, -(-end // boundary) * boundary))


def mesh_layout(held: Sequence[HeldChunk], axes: Sequence[MeshAxis]) -> MeshLayout:
    """Record where a sharded run's ranks store what they hold, from the first rank's chunks: none has larger ones."""
    tensors: dict[tuple[tuple[tuple[int, str], ...], int], list[StoredTensor]] = {}
    for group in _groups(held):
        storing = _storing(group)
        for chunk in group:
            meta = chunk.tensor
            tensors.setdefault((chunk.cuts, storing), []).append(StoredTensor(meta.name, meta.dtype, meta.shape))
    groups = (TensorGroup(*key, tuple(members)) for key, members in tensors.items())
    return MeshLayout(tuple(axes), tuple(groups))


def data_size(entries: Sequence[Entry]) -> int:
    """Return the bytes of the data object that holds these entries."""
    return entries[-1].start + entries[-1].size if entries else 0


def _groups(held: Sequence[HeldChunk]) -> list[list[HeldChunk]]:
    """Collect chunks that the same ranks hold, in name order; those with the most replicas come first."""
    groups: dict[tuple[int, tuple[str, ...]], list[HeldChunk]] = {}
    for chunk in sorted(held, key=lambda chunk: chunk.tensor.name):
        # The axes tell groups apart that have as many replicas on other ranks: each has to be cut alike on all of its own.
        groups.setdefault((-chunk.replicas, chunk.replica_axes), []).append(chunk)
    return [group for _, group in sorted(groups.items())]


def _storing(group: Sequence[HeldChunk]) -> int:
    """Return how many of the ranks that hold these chunks store them: each at least a block, or one alone."""
    return min(group[0].replicas, max(sum(chunk.size for chunk in group) // BLOCK_BYTES, 1))


def _cut_rows(group: Sequence[HeldChunk], replicas: int) -> Iterator[Entry]:
    """Cut chunks that the same ranks hold over the first `replicas` of these; yield this rank's rows of each."""
    replica = group[0].replica
    if replica >= replicas:
        return
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


def _placed(entries: Iterable[Entry], start: int) -> Iterator[Entry]:
    for entry in entries:
        yield Entry(entry.name, entry.dtype, entry.shape, entry.offsets, entry.lengths, start, entry.size)
        start += -(-entry.size // ALIGN) * ALIGN
