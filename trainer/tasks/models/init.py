"""Random weights that depend on the run's seed and the parameter's name alone, however a parameter is sharded."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.parallel.shards import local_chunk
from trainer.step.precision import stream_seed

BLOCK_ELEMENTS = 1 << 18
"""Elements that share a seed. A rank draws every block that its chunk touches whole, so a larger one would cost ranks with
small chunks more, and a smaller one everybody: seeding takes a microsecond, drawing a block between 1 and 2 ms."""


@torch.no_grad()
def fill_normal(name: str, parameter: Tensor, *, std: float, seed: int) -> None:
    """Fill a parameter [any shape], or this rank's shard of it, with numbers of a normal distribution around 0."""
    chunk, offsets = local_chunk(name, parameter)
    fill_chunk(name, chunk, tuple(parameter.shape), offsets, std=std, seed=seed)


@torch.no_grad()
def fill_chunk(
    name: str, target: Tensor, shape: Sequence[int], offsets: Sequence[int], *, std: float, seed: int
) -> None:
    """Fill `target`, the chunk that begins at `offsets` of the parameter `name` of `shape`.

    Every way to cut a parameter gives the same numbers, because each block of rows with BLOCK_ELEMENTS elements has its own
    seed. They are drawn on the CPU: CUDA's generator draws other numbers. ValueError where the chunk is not inside the
    parameter.
    """
    if not _inside(target.shape, offsets, shape):
        raise ValueError(f"{name}: a chunk of {list(target.shape)} at {list(offsets)} is not inside {list(shape)}")
    if not target.numel():
        return
    row = tuple(shape[1:])
    rows_per_block = max(BLOCK_ELEMENTS // math.prod(row), 1)
    columns = tuple(slice(at, at + length) for at, length in zip(offsets[1:], target.shape[1:], strict=True))
    first, last = offsets[0], offsets[0] + target.shape[0]
    generator = torch.Generator()
    key = zlib.crc32(name.encode())
    for block in range(first // rows_per_block, -(-last // rows_per_block)):
        begin = block * rows_per_block
        end = min(begin + rows_per_block, shape[0])
        generator.manual_seed(stream_seed(seed, key, block))
        drawn = torch.empty((end - begin, *row)).normal_(std=std, generator=generator)
        low, high = max(begin, first), min(end, last)
        target[low - first : high - first].copy_(drawn[(slice(low - begin, high - begin), *columns)])


def _inside(lengths: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> bool:
    return (
        len(lengths) == len(offsets) == len(shape) > 0
        and all(offset >= 0 for offset in offsets)
        and all(at + length <= size for at, length, size in zip(offsets, lengths, shape, strict=True))
    )
