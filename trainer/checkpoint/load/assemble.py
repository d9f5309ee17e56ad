"""Tensors, or the regions of them that a rank holds, out of verified bytes, with as little reading and copying as possible."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from queue import SimpleQueue

import torch

from lustrain.problem import UserError
from trainer.checkpoint.format.chunks import Chunk, CoverError, collect_chunks, require_cover
from trainer.checkpoint.format.mesh_layout import ranks_of, ranks_storing
from trainer.checkpoint.format.records import BLOCK_BYTES, Entry, Manifest, MeshLayout, Part, StoredTensor
from trainer.checkpoint.load.parts import ITEM_BYTES, PartReader, blocks_covering, logical_size
from trainer.chunk import TensorMeta


@dataclass(frozen=True)
class Region:
    """`lengths` elements from `offsets` on, along each dimension, of a tensor that has to be `of` this kind (None: any)."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    of: TensorMeta | None = None


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


def read_tensors(
    manifest: Manifest,
    open_parts: OpenParts,
    want: Wanted,
    threads: int,
    targets: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Copy what is wanted of each tensor, verified, into its target, which has the region's shape, or into fresh memory.

    Where the manifest has a layout, only the parts that it names are opened, unless they lack a chunk. Only the blocks that
    hold wanted rows are read, and verified as a whole. In memory are `threads` blocks at a time, and rows of which a part is
    still to come or which the target's memory does not hold as they are stored.

    Before anything is read: CoverError names a tensor of which a wanted element is missing, UserError every target that the
    checkpoint lacks or has in another kind than its region says; ValueError is for a region outside its tensor. Damage is
    found later, and leaves some targets filled.
    """
    readers, planned = _plan_reads(manifest, open_parts, want)
    if targets is None:
        targets = {name: _fresh_tensor(tensor.dtype, region.lengths) for name, (tensor, region, _) in planned.items()}
    elif missing := sorted(targets.keys() - planned.keys()):
        why = "is missing in the checkpoint: the model or the optimizer has changed"
        raise UserError([f"{name} {why}; needed: {list(targets[name].shape)}" for name in missing])
    _fill(readers, [(read, targets[name]) for name, (_, _, reads) in planned.items() for read in reads], threads)
    return dict(targets)


class _Landing:
    """Where the rows of one read go: into the target, by way of a copy where they do not lie there as they are stored.

    `copy_block` may be called for different blocks from different threads.
    """

    def __init__(self, read: _Read, target: torch.Tensor) -> None:
        self._read, self._target = read, cut(target, read.target)
        self._dtype = torch_dtype(read.rows.dtype)
        self._missing = read.rows.size
        self._lock = threading.Lock()
        self._rows: torch.Tensor | None = None

    def copy_block(self, begin: int, block: torch.Tensor) -> None:
        """Copy what a block, which begins at this byte of the part, holds of the rows."""
        rows = self._read.rows
        first, end = max(rows.start, begin), min(rows.start + rows.size, begin + len(block))
        with self._lock:
            if self._rows is None:
                target = self._target
                as_stored = target.is_contiguous() and target.device.type == "cpu" and target.dtype == self._dtype
                is_whole = rows.lengths == self._read.source.lengths
                self._rows = target if as_stored and is_whole else _fresh_tensor(rows.dtype, rows.lengths)
            landed = self._rows
        landed.view(-1).view(torch.uint8)[first - rows.start : end - rows.start].copy_(
            block[first - begin : end - begin]
        )
        with self._lock:
            self._missing -= end - first
            complete = not self._missing
        if complete and landed is not self._target:
            self._target.copy_(cut(landed, self._read.source))
            self._rows = None


def _fill(readers: Sequence[PartReader], reads: Sequence[tuple[_Read, torch.Tensor]], threads: int) -> None:
    """Read each block that holds wanted rows once, in the order in which they are stored, and copy these where they belong."""
    landings: dict[tuple[int, int], list[_Landing]] = {}
    for read, target in reads:
        landing = _Landing(read, target)
        for number in blocks_covering([(read.rows.start, read.rows.start + read.rows.size)]):
            landings.setdefault((read.part, number), []).append(landing)
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(min(threads, len(landings))):
        buffers.put(fresh_memory(BLOCK_BYTES))

    @torch.no_grad()
    def fill_from(part: int, number: int) -> None:
        buffer = buffers.get()
        try:
            block = torch.frombuffer(buffer, dtype=torch.uint8)[: logical_size(readers[part].index, number)]
            readers[part].read(number, block.numpy().data)
            for landing in landings[part, number]:
                landing.copy_block(number * BLOCK_BYTES, block)
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(threads) as pool:
        pending = [pool.submit(fill_from, *place) for place in sorted(landings)]
        try:
            for block in pending:
                block.result()
        finally:
            for block in pending:
                block.cancel()


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
        if region.of and (needed := _kind(region.of)) != (found := _kind(tensor)):
            misfits.append(f"{tensor.name} = {found} in the checkpoint: does not fit; needed: {needed}")
            continue
        ends = [offset + length for offset, length in zip(region.offsets, region.lengths, strict=True)]
        if len(ends) != len(tensor.shape) or any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
            raise ValueError(f"{tensor.name}: {region} does not lie inside {list(tensor.shape)}")
        regions[tensor] = region
    if misfits:
        raise UserError(misfits)
    return regions


def _kind(tensor: StoredTensor | TensorMeta) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


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


def _fresh_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    size = prod(shape) * ITEM_BYTES[dtype]
    memory = fresh_memory(size)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(torch_dtype(dtype)).view(shape)


def fresh_memory(size: int) -> mmap.mmap:
    """Return private zero pages, huge ones where the kernel has them; what is never touched costs address space only.

    First touch, not the disk and not the checksums, is most of a restore from the page cache: 2 GB with two threads took 0.3 s
    into 2 MiB pages and 0.7 s into 4 KiB ones.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without huge pages answers EINVAL, and the small ones serve as well.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
