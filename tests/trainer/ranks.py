"""Runs a function on several real ranks: processes that join through `trainer.parallel` as under torchrun."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from trainer import parallel
from trainer.config import ParallelConfig


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(world, *args)` on every rank at once; its results by rank. `work` is a module-level function."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(world_size, multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(_one_rank, rank, world_size, port, work, args) for rank in range(world_size)]
        return [rank.result(timeout=240) for rank in ranks]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives to each rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _one_rank(rank: int, world_size: int, port: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    environment = rank_environment(rank, world_size, port)
    os.environ.update(environment)
    world = parallel.join(ParallelConfig(device="cpu", timeout_s=120), environment)
    try:
        return work(world, *args)
    finally:
        world.close()
