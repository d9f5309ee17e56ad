"""Random weights that depend on the run's seed and the parameter's name alone, however a parameter is sharded."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.step.precision import stream_seed

BLOCK_ELEMENTS = 1 << 18
"""Elements that share a seed. A rank draws every block that its chunk touches whole, so a larger one would cost ranks with
small chunks more, and a smaller one everybody: seeding takes a microsecond, drawing a block between 1 and 2 ms."""


@torch.no_grad()
def fill_normal(
    name: str,
    target: Tensor,
    *,
    std: float,
    seed: int,
    shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> None:
    """Fill `target` [any shape] with its part of parameter `name`, drawn from a normal distribution around 0.

    `target` is the chunk that begins at `offsets` of the whole parameter of `shape`; without them it is the whole. Every way to
    cut a parameter gives the same numbers, because each block of rows with BLOCK_ELEMENTS elements has its own seed. They are
    drawn on the CPU: CUDA's generator draws other numbers. ValueError where the chunk does not lie inside the parameter.
    """
    shape = tuple(target.shape if shape is None else shape)
    offsets = (0,) * len(shape) if offsets is None else tuple(offsets)
    if not _inside(target.shape, offsets, shape):
        raise ValueError(f"{name}: a chunk of {list(target.shape)} at {list(offsets)} is not inside {list(shape)}")
    if not target.numel():
        return
    row = shape[1:]
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
