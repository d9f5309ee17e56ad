"""The forward passes of each rank: micro-batches are dealt out in turn, and every rank makes as many passes as the others."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """One forward pass of one rank."""

    number: int
    """Of its micro-batch, counted over all ranks."""
    counts: bool
    """False for a surplus pass, whose loss has weight 0: collectives need all ranks in every pass."""


def passes(micro_batches: int, rank: int, ranks: int) -> list[Pass]:
    """Return a rank's passes over micro-batches 0 .. `micro_batches` - 1; `micro_batches` and `ranks` are at least 1.

    A surplus pass repeats the rank's own first micro-batch, or the last of all where it has none. Seeded by its number, it
    computes what a pass that counts computes as well. So it brings no infinity into a step that has none, and weight 0 makes
    each of its gradients exactly 0 (0 x infinity would be NaN).
    """
    first = min(rank, micro_batches - 1)
    numbers = range(rank, -(-micro_batches // ranks) * ranks, ranks)
    return [Pass(number, True) if number < micro_batches else Pass(first, False) for number in numbers]
