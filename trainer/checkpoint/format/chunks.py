"""The stored chunks that make each tensor: pure, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from trainer.checkpoint.format.records import Entry, RankIndex
from trainer.storage import CorruptObjectError


@dataclass(frozen=True)
class Chunk:
    """A stored chunk of a tensor: `part` counts the parts in the manifest's order."""

    part: int
    entry: Entry


def chunks_by_name(indexes: Sequence[RankIndex]) -> dict[str, list[Chunk]]:
    """Collect each tensor's chunks over all parts, by offset; CorruptObjectError unless they cover it exactly once."""
    by_name: dict[str, list[Chunk]] = {}
    for part, index in enumerate(indexes):
        for entry in index.entries:
            by_name.setdefault(entry.name, []).append(Chunk(part, entry))
    for name, chunks in by_name.items():
        chunks.sort(key=lambda chunk: chunk.entry.offsets)
        problem = _cover_problem([chunk.entry for chunk in chunks])
        if problem:
            raise CorruptObjectError(f"tensor {name}: {problem}")
    return by_name


def _cover_problem(entries: Sequence[Entry]) -> str:
    """Return why these chunks, sorted by offset, do not make one tensor, or the empty string."""
    first = entries[0]
    if any((e.shape, e.dtype) != (first.shape, first.dtype) for e in entries):
        return "its chunks disagree about shape or dtype"
    filled = [e for e in entries if e.size]
    if sum(prod(e.lengths) for e in filled) != prod(first.shape):
        return f"its chunks do not add up to shape {list(first.shape)}"
    return "its chunks overlap" if _any_overlap(filled) else ""


def _any_overlap(entries: Sequence[Entry]) -> bool:
    """Sweep along the dimension that is cut into the most pieces: only chunks that meet there are compared.

    A mesh of 128 x 8 ranks makes 1,024 chunks of a matrix, and half a million pairs.
    """
    dims = range(len(entries[0].offsets)) if entries else ()
    dim = max(dims, key=lambda at: len({entry.offsets[at] for entry in entries}), default=None)
    if dim is None:
        return len(entries) > 1
    open_chunks: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.offsets[dim]):
        begin = entry.offsets[dim]
        open_chunks = [other for other in open_chunks if other.offsets[dim] + other.lengths[dim] > begin]
        if any(_overlap(entry, other) for other in open_chunks):
            return True
        open_chunks.append(entry)
    return False


def _overlap(a: Entry, b: Entry) -> bool:
    return all(
        a_at < b_at + b_len and b_at < a_at + a_len
        for a_at, a_len, b_at, b_len in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    )
