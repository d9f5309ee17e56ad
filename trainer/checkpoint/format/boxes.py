"""The stored boxes that make each tensor: pure, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from trainer.checkpoint.format.records import Entry, RankIndex
from trainer.storage import CorruptObjectError


@dataclass(frozen=True)
class Box:
    """A stored box of a tensor: `part` counts the parts in the manifest's order."""

    part: int
    entry: Entry


def boxes_by_name(indexes: Sequence[RankIndex]) -> dict[str, list[Box]]:
    """Collect each tensor's boxes over all parts, by offset; CorruptObjectError unless they cover it exactly once."""
    by_name: dict[str, list[Box]] = {}
    for part, index in enumerate(indexes):
        for entry in index.entries:
            by_name.setdefault(entry.name, []).append(Box(part, entry))
    for name, boxes in by_name.items():
        boxes.sort(key=lambda box: box.entry.offsets)
        problem = _cover_problem([box.entry for box in boxes])
        if problem:
            raise CorruptObjectError(f"tensor {name}: {problem}")
    return by_name


def _cover_problem(entries: Sequence[Entry]) -> str:
    """Return why these boxes, sorted by offset, do not make one tensor, or the empty string."""
    first = entries[0]
    if any((e.shape, e.dtype) != (first.shape, first.dtype) for e in entries):
        return "its boxes disagree about shape or dtype"
    filled = [e for e in entries if e.size]
    if sum(prod(e.lengths) for e in filled) != prod(first.shape):
        return f"its boxes do not add up to shape {list(first.shape)}"
    if all(_is_rows(e) for e in filled):
        in_line = all(b.offsets[0] == a.offsets[0] + a.lengths[0] for a, b in pairwise(filled))
        return "" if in_line else "its boxes overlap"
    overlap = any(_overlap(a, b) for i, a in enumerate(filled) for b in filled[i + 1 :])
    return "its boxes overlap" if overlap else ""


def _is_rows(entry: Entry) -> bool:
    return entry.lengths[1:] == entry.shape[1:]


def _overlap(a: Entry, b: Entry) -> bool:
    return all(
        a_at < b_at + b_len and b_at < a_at + a_len
        for a_at, a_len, b_at, b_len in zip(a.offsets, a.lengths, b.offsets, b.lengths, strict=True)
    )
