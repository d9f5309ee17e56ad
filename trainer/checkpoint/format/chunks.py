"""The stored chunks that make each tensor: pure, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from trainer.checkpoint.format.records import Entry, RankIndex, StoredTensor
from trainer.storage import CorruptObjectError


class CoverError(CorruptObjectError):
    """The chunks of a tensor do not make it up, or a region of it."""


@dataclass(frozen=True)
class Chunk:
    """A stored chunk of a tensor: `part` counts the parts in the manifest's order."""

    part: int
    entry: Entry


def chunks_by_name(indexes: Sequence[RankIndex]) -> dict[str, list[Chunk]]:
    """Collect each tensor's chunks over all parts, by offset; CoverError unless they cover it exactly once."""
    by_name = collect_chunks(indexes)
    for name, chunks in by_name.items():
        first = chunks[0].entry
        require_cover(
            StoredTensor(name, first.dtype, first.shape), [chunk.entry for chunk in chunks], prod(first.shape)
        )
    return by_name


def collect_chunks(indexes: Sequence[RankIndex]) -> dict[str, list[Chunk]]:
    """Collect each tensor's chunks over some parts, by offset, whether or not they make it up."""
    by_name: dict[str, list[Chunk]] = {}
    for part, index in enumerate(indexes):
        for entry in index.entries:
            by_name.setdefault(entry.name, []).append(Chunk(part, entry))
    for chunks in by_name.values():
        chunks.sort(key=lambda chunk: chunk.entry.offsets)
    return by_name


def require_cover(tensor: StoredTensor, entries: Sequence[Entry], elements: int) -> None:
    """CoverError unless these are chunks of the tensor, overlap nowhere and have so many elements together."""
    problem = ""
    if any((e.shape, e.dtype) != (tensor.shape, tensor.dtype) for e in entries):
        problem = "its chunks disagree about shape or dtype"
    elif sum(prod(e.lengths) for e in entries) != elements:
        problem = f"its chunks do not add up to shape {list(tensor.shape)}"
    elif _any_overlap([e for e in entries if e.size]):
        problem = "its chunks overlap"
    if problem:
        raise CoverError(f"tensor {tensor.name}: {problem}")


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
