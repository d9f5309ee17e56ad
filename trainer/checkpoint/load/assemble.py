"""Tensors out of verified bytes, with as little copying as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from trainer.checkpoint.format.chunks import Chunk, chunks_by_name
from trainer.checkpoint.format.records import Entry
from trainer.checkpoint.load.memory import fresh_memory
from trainer.checkpoint.load.parts import ITEM_BYTES, PartReader, blocks_covering, fetch_blocks


def read_tensors(readers: Sequence[PartReader], want: Callable[[str], bool], threads: int) -> dict[str, torch.Tensor]:
    """Read the wanted tensors, verified and in parallel, into writable host memory.

    A tensor that lies whole in one part is a view of that part's memory, which lives as long as any of its views; one cut over
    several parts is copied together. Bytes that share a block with wanted ones are verified too.
    """
    wanted = {name: chunks for name, chunks in chunks_by_name([r.index for r in readers]).items() if want(name)}
    fetch_blocks(_blocks_of(readers, wanted), threads)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(lambda chunks: _assembled(readers, chunks), wanted.values()), strict=True))


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


def _blocks_of(readers: Sequence[PartReader], wanted: dict[str, list[Chunk]]) -> list[tuple[PartReader, int]]:
    ranges: dict[int, list[tuple[int, int]]] = {}
    for chunks in wanted.values():
        for chunk in chunks:
            ranges.setdefault(chunk.part, []).append((chunk.entry.start, chunk.entry.start + chunk.entry.size))
    return [(readers[part], number) for part in sorted(ranges) for number in blocks_covering(ranges[part])]


def _assembled(readers: Sequence[PartReader], chunks: Sequence[Chunk]) -> torch.Tensor:
    first = chunks[0].entry
    if len(chunks) == 1 or not prod(first.shape):
        return chunk_tensor(readers[chunks[0].part], first)
    memory = fresh_memory(prod(first.shape) * ITEM_BYTES[first.dtype])
    whole = torch.frombuffer(memory, dtype=torch_dtype(first.dtype), count=prod(first.shape)).view(first.shape)
    for chunk in chunks:
        target = whole
        for dim, (offset, length) in enumerate(zip(chunk.entry.offsets, chunk.entry.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        target.copy_(chunk_tensor(readers[chunk.part], chunk.entry))
    return whole
