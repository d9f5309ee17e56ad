"""Runs a function on several ranks: real processes that join as under torchrun, or threads that only vote."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.fork_server import ForkServer
from trainer import parallel
from trainer.config import ParallelConfig


def run_ranks(server: ForkServer, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(world, *args)` on every rank at once; its results by rank. `work` is a module-level function."""
    return server.call(_one_rank, world_size, work, args)


def run_threads(world_size: int, work: Callable[[int], Any], patience_s: float = 300.0) -> list[Any]:
    """`work(rank)` on every rank at once, each a thread; what each returns or raises, by rank.

    AssertionError when a rank takes longer than `patience_s`: less than ranks wait for each other at a start.
    """
    ends: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            ends[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 -- what a rank raises is for the test to look at
            ends[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    waiting = [rank for rank in range(world_size) if rank not in ends]
    assert not waiting, f"ranks {waiting} still wait; the others: {ends}"
    return [ends[rank] for rank in range(world_size)]


def _one_rank(rank: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    world = parallel.join(ParallelConfig(device="cpu", timeout_s=120), os.environ)
    try:
        return work(world, *args)
    finally:
        world.close()
