"""From verified bytes to tensors: which boxes make a tensor, and putting them together with as little copying as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from trainer.checkpoint.parts import ITEM_BYTES, PartReader, blocks_covering, fetch_blocks, fresh_memory
from trainer.checkpoint.records import Entry, RankIndex
from trainer.storage import CorruptObjectError


@dataclass(frozen=True)
class Box:
    """A stored box of a tensor: `part` counts the parts in the manifest's order."""

    part: int
    entry: Entry


def boxes_by_name(indexes: Sequence[RankIndex]) -> dict[str, list[Box]]:
    """Every tensor's boxes over all parts, by offset; CorruptObjectError when they do not cover it exactly once."""
    found: dict[str, list[Box]] = {}
    for part, index in enumerate(indexes):
        for entry in index.entries:
            found.setdefault(entry.name, []).append(Box(part, entry))
    for name, boxes in found.items():
        boxes.sort(key=lambda box: box.entry.offsets)
        problem = _cover_problem([box.entry for box in boxes])
        if problem:
            raise CorruptObjectError(f"tensor {name}: {problem}")
    return found


def read_tensors(readers: Sequence[PartReader], want: Callable[[str], bool], threads: int) -> dict[str, torch.Tensor]:
    """The wanted tensors, read and verified in parallel, on the host, writable.

    A tensor that lies whole in one part is a view of that part's memory, which lives as long as any of its views; one cut over
    several parts is copied together. Bytes that share a block with wanted ones are verified too.
    """
    wanted = {name: boxes for name, boxes in boxes_by_name([r.index for r in readers]).items() if want(name)}
    fetch_blocks(_blocks_of(readers, wanted), threads)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(lambda boxes: _assembled(readers, boxes), wanted.values()), strict=True))


def box_tensor(reader: PartReader, entry: Entry) -> torch.Tensor:
    """One fetched box as a tensor of `entry.lengths`: a view where alignment permits, else a copy."""
    dtype = torch_dtype(entry.dtype)
    if entry.size == 0:
        return torch.empty(entry.lengths, dtype=dtype)
    data = reader.bytes_of(entry.start, entry.size)
    if entry.start % ITEM_BYTES[entry.dtype]:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).view(entry.lengths)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name that `parts.ITEM_BYTES` knows."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def _blocks_of(readers: Sequence[PartReader], wanted: dict[str, list[Box]]) -> list[tuple[PartReader, int]]:
    ranges: dict[int, list[tuple[int, int]]] = {}
    for boxes in wanted.values():
        for box in boxes:
            ranges.setdefault(box.part, []).append((box.entry.start, box.entry.start + box.entry.size))
    return [(readers[part], number) for part in sorted(ranges) for number in blocks_covering(ranges[part])]


def _assembled(readers: Sequence[PartReader], boxes: Sequence[Box]) -> torch.Tensor:
    first = boxes[0].entry
    if len(boxes) == 1 or not prod(first.shape):
        return box_tensor(readers[boxes[0].part], first)
    memory = fresh_memory(prod(first.shape) * ITEM_BYTES[first.dtype])
    whole = torch.frombuffer(memory, dtype=torch_dtype(first.dtype), count=prod(first.shape)).view(first.shape)
    for box in boxes:
        target = whole
        for dim, (offset, length) in enumerate(zip(box.entry.offsets, box.entry.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(box_tensor(readers[box.part], box.entry))
    return whole


def _cover_problem(entries: Sequence[Entry]) -> str:
    """Why these boxes, sorted by offset, are not one tensor, or the empty string."""
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
