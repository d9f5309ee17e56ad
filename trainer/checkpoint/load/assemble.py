"""Tensors, or the regions of them that a rank holds, out of verified bytes, with as little reading and copying as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod

import torch

from lustrain.problem import UserError
from trainer.checkpoint.format.chunks import Chunk, CoverError, collect_chunks, require_cover
from trainer.checkpoint.format.mesh_layout import ranks_of, ranks_storing
from trainer.checkpoint.format.records import Entry, Manifest, MeshLayout, Part, StoredTensor
from trainer.checkpoint.load.memory import fresh_memory
from trainer.checkpoint.load.parts import ITEM_BYTES, PartReader, blocks_covering, fetch_blocks


@dataclass(frozen=True)
class Region:
    """`lengths` elements from `offsets` on, along each dimension, of a tensor that has to have `shape` (None: any)."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: tuple[int, ...] | None = None


Wanted = Callable[[str], Region | bool]
"""What a rank needs of a tensor, by name: a region, all of it or nothing."""


@dataclass(frozen=True)
class _Read:
    """The rows of a stored chunk to fetch, the region to take from them, and where that belongs in the target."""

    part: int
    rows: Entry
    source: Region
    target: Region


OpenParts = Callable[[Sequence[Part]], Sequence[PartReader]]


def read_tensors(manifest: Manifest, open_parts: OpenParts, want: Wanted, threads: int) -> dict[str, torch.Tensor]:
    """Read what is wanted, verified and in parallel, into writable host memory.

    What lies in one piece in one part is a view of that part's memory, which lives as long as any of its views; everything else
    is copied into memory of its own. Where the manifest has a layout, only the parts that it names are opened, unless they
    lack a chunk. Only the blocks that hold wanted rows are read, and verified as a whole. CoverError names a tensor of which
    a wanted element is missing, UserError every tensor of another shape than its region says; ValueError is for a region
    outside its tensor.
    """
    readers, planned = _plan_reads(manifest, open_parts, want)
    fetch_blocks(_blocks_of(readers, [read for _, _, reads in planned.values() for read in reads]), threads)
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(lambda plan: _assembled(readers, *plan), planned.values())
        return dict(zip(planned, done, strict=True))


def fill_tensors(
    manifest: Manifest, open_parts: OpenParts, want: Wanted, targets: Mapping[str, torch.Tensor], threads: int
) -> None:
    """Copy what is wanted of each tensor into its target, which has the region's shape.

    Only one part's blocks are in memory at a time. Errors as `read_tensors`; they may leave some targets filled.
    """
    readers, planned = _plan_reads(manifest, open_parts, want)
    reads_of: dict[int, list[tuple[str, _Read]]] = {}
    for name, (_, _, reads) in planned.items():
        for read in reads:
            reads_of.setdefault(read.part, []).append((name, read))
    unread = {part: readers[part] for part in sorted(reads_of)}
    del readers
    while unread:
        # A reader's memory lives as long as the reader.
        part = next(iter(unread))
        reader = unread.pop(part)
        ranges = [(read.rows.start, read.rows.start + read.rows.size) for _, read in reads_of[part]]
        fetch_blocks([(reader, number) for number in blocks_covering(ranges)], threads)
        for name, read in reads_of[part]:
            cut(targets[name], read.target).copy_(cut(chunk_tensor(reader, read.rows), read.source))


def _plan_reads(
    manifest: Manifest, open_parts: OpenParts, want: Wanted
) -> tuple[Sequence[PartReader], dict[str, tuple[StoredTensor, Region, list[_Read]]]]:
    """Plan by the manifest's layout where it has one, else, or where that lacks a chunk, by the indexes of all parts."""
    try:
        return _planned(manifest, open_parts, want)
    except CoverError:
        if manifest.layout is None:
            raise
        # The indexes are what counts: a layout that is wrong about them costs time, not the checkpoint.
        readers, planned = _planned(replace(manifest, layout=None), open_parts, want)
        names = {tensor.name for group in manifest.layout.groups for tensor in group.tensors}
        if any(want(name) is not False for name in names - planned.keys()):
            raise
        return readers, planned


def _planned(
    manifest: Manifest, open_parts: OpenParts, want: Wanted
) -> tuple[Sequence[PartReader], dict[str, tuple[StoredTensor, Region, list[_Read]]]]:
    """Open the parts that are needed, and plan the reading of each tensor; CoverError where they do not hold all of it."""
    layout = manifest.layout
    if layout is None:
        readers = open_parts(manifest.parts)
        chunks = collect_chunks([reader.index for reader in readers])
        first = {name: stored[0].entry for name, stored in chunks.items()}
        regions = _regions([StoredTensor(name, e.dtype, e.shape) for name, e in first.items()], want)
    else:
        regions = _regions([tensor for group in layout.groups for tensor in group.tensors], want)
        ranks = _ranks_storing(layout, regions)
        readers = open_parts([part for part in manifest.parts if part.rank in ranks])
        chunks = collect_chunks([reader.index for reader in readers])
    return readers, {
        tensor.name: (tensor, region, _reads(tensor, chunks.get(tensor.name, []), region))
        for tensor, region in regions.items()
    }


def _regions(stored: Sequence[StoredTensor], want: Wanted) -> dict[StoredTensor, Region]:
    """Return the wanted region of each tensor of which any is wanted; errors as `read_tensors`."""
    misfits: list[str] = []
    regions: dict[StoredTensor, Region] = {}
    for tensor in stored:
        wanted = want(tensor.name)
        if wanted is False:
            continue
        region = Region((0,) * len(tensor.shape), tensor.shape) if wanted is True else wanted
        if region.shape not in (None, tensor.shape):
            kind, needed = (f"{tensor.dtype}{list(shape or ())}" for shape in (tensor.shape, region.shape))
            misfits.append(f"{tensor.name} = {kind} in the checkpoint: does not fit; needed: {needed}")
            continue
        ends = [offset + length for offset, length in zip(region.offsets, region.lengths, strict=True)]
        if len(ends) != len(tensor.shape) or any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            raise ValueError(f"{tensor.name}: {region} does not lie inside {list(tensor.shape)}")
        regions[tensor] = region
    if misfits:
        raise UserError(misfits)
    return regions


def _ranks_storing(layout: MeshLayout, regions: Mapping[StoredTensor, Region]) -> set[int]:
    ranks: set[int] = set()
    for group in layout.groups:
        for tensor in group.tensors:
            if len(ranks) < ranks_of(layout) and (region := regions.get(tensor)):
                ranks.update(ranks_storing(layout, group, tensor, region.offsets, region.lengths))
    return ranks


def rows_holding(entry: Entry, region: Region) -> tuple[Entry, Region]:
    """Return the smallest run of whole rows of a stored chunk that holds a region of it, and the region within these rows.

    Rows are those of the first dimension longer than 1. `region` counts from the chunk's own beginning.
    """
    at = next((dim for dim, length in enumerate(entry.lengths) if length > 1), None)
    if at is None:
        return entry, region
    row_bytes = prod(entry.lengths[at + 1 :]) * ITEM_BYTES[entry.dtype]
    first, count = region.offsets[at], region.lengths[at]
    rows = replace(
        entry,
        offsets=(*entry.offsets[:at], entry.offsets[at] + first, *entry.offsets[at + 1 :]),
        lengths=(*entry.lengths[:at], count, *entry.lengths[at + 1 :]),
        start=entry.start + first * row_bytes,
        size=count * row_bytes,
    )
    return rows, Region((*region.offsets[:at], 0, *region.offsets[at + 1 :]), region.lengths)


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the region of a tensor as a view."""
    for dim, (offset, length) in enumerate(zip(region.offsets, region.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def chunk_tensor(reader: PartReader, entry: Entry) -> torch.Tensor:
    """Return one fetched chunk as a tensor of `entry.lengths`: a view where alignment permits, else a copy."""
    dtype = torch_dtype(entry.dtype)
    if entry.size == 0:
        return torch.empty(entry.lengths, dtype=dtype)
    data = reader.bytes_of(entry.start, entry.size)
    if entry.start % ITEM_BYTES[entry.dtype]:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).view(entry.lengths)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in `parts.ITEM_BYTES`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def _reads(tensor: StoredTensor, chunks: Sequence[Chunk], region: Region) -> list[_Read]:
    """Plan the reading of a region; CoverError unless chunks of this tensor hold each element of it once."""
    ends = [offset + length for offset, length in zip(region.offsets, region.lengths, strict=True)]
    if wrong := [c.entry for c in chunks if (c.entry.dtype, c.entry.shape) != (tensor.dtype, tensor.shape)]:
        require_cover(tensor, wrong, 0)
    reads, met = [], []
    for chunk in chunks:
        entry = chunk.entry
        first = [max(pair) for pair in zip(entry.offsets, region.offsets, strict=True)]
        last = [min(at + n, end) for at, n, end in zip(entry.offsets, entry.lengths, ends, strict=True)]
        lengths = tuple(end - begin for begin, end in zip(first, last, strict=True))
        if any(length <= 0 for length in lengths):
            continue
        met.append(replace(entry, offsets=tuple(first), lengths=lengths))
        rows, inside = rows_holding(entry, Region(_relative_to(first, entry.offsets), lengths))
        reads.append(_Read(chunk.part, rows, inside, Region(_relative_to(first, region.offsets), lengths)))
    require_cover(tensor, met, prod(region.lengths))
    return reads


def _relative_to(ats: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    return tuple(at - begin for at, begin in zip(ats, begins, strict=True))


def _blocks_of(readers: Sequence[PartReader], reads: Sequence[_Read]) -> list[tuple[PartReader, int]]:
    ranges: dict[int, list[tuple[int, int]]] = {}
    for read in reads:
        ranges.setdefault(read.part, []).append((read.rows.start, read.rows.start + read.rows.size))
    return [(readers[part], number) for part in sorted(ranges) for number in blocks_covering(ranges[part])]


def _assembled(
    readers: Sequence[PartReader], tensor: StoredTensor, region: Region, reads: Sequence[_Read]
) -> torch.Tensor:
    dtype = torch_dtype(tensor.dtype)
    if not reads:
        return torch.empty(region.lengths, dtype=dtype)
    if len(reads) == 1 and reads[0].rows.lengths == region.lengths:
        return chunk_tensor(readers[reads[0].part], reads[0].rows)
    count = prod(region.lengths)
    memory = fresh_memory(count * ITEM_BYTES[tensor.dtype])
    target = torch.frombuffer(memory, dtype=dtype, count=count).view(region.lengths)
    for read in reads:
        rows = chunk_tensor(readers[read.part], read.rows)
        cut(target, read.target).copy_(cut(rows, read.source))
    return target
