"""The ranks of a job: read from the environment that torchrun sets, joined through its store."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lustrain.problem import UserError, problem
from trainer.config import ParallelConfig
from trainer.environment import store_prefix
from trainer.errors import EXIT_FAILURE, EXIT_PEERS

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
LARGEST = dict.fromkeys(_NUMBERS, 2**31 - 1) | {"MASTER_PORT": 65_535}
"""A rank is a C int in torch, a port 16 bits (RFC 9293, section 3.1)."""


@dataclass(frozen=True)
class World:
    """This process among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store
    """Small values that every rank can read, without a collective."""

    def close(self) -> None:
        """Leave the process group; safe to call when there is none."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join(config: ParallelConfig, environ: Mapping[str, str] = os.environ) -> World:
    """Join the job that torchrun's variables describe, or be alone without them.

    UserError where they or the device are wrong; with EXIT_PEERS where other ranks did not come.
    """
    given = [name for name in _NUMBERS if name in environ]
    if not given:
        _refuse_one_of_many(environ)
        device = choose_device(config.device, 0)
        return World(0, 1, 0, device, HashStore())
    rank, world_size, local_rank = _ranks(environ)
    device = choose_device(config.device, local_rank)
    timeout = timedelta(seconds=config.timeout_s)
    address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    try:
        with _stderr_held_back():
            store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
        store = PrefixStore(store_prefix(environ), store)
        store.set_timeout(timeout)
        dist.init_process_group(
            backends(device, config),
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
        why = f"rank {rank} of {world_size} did not meet the others within {config.timeout_s:g} s ({reason})"
        fix = "start all ranks, open the port between the nodes, or raise parallel.timeout_s"
        # A timeout is blamed on missing peers; a busy port or a broken NCCL is an error of this rank.
        ours = isinstance(error, dist.DistBackendError) or "EADDRINUSE" in str(error)
        code = EXIT_FAILURE if ours else EXIT_PEERS
        raise UserError(problem("MASTER_ADDR:MASTER_PORT", address, why, fix=fix), code) from error
    return World(rank, world_size, local_rank, device, PrefixStore("lustrain", store))


def backends(device: torch.device, config: ParallelConfig) -> str:
    """Return what ranks exchange through: NCCL between GPUs, and gloo where norms and overflows of host tensors are summed."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if config.states_on_host else "nccl"


@contextmanager
def _stderr_held_back() -> Iterator[None]:
    """Keep what torch's C++ prints until ranks have met; where they do not, the error says it in one line and not in pages."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as output:
        stderr = os.dup(2)
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        output.seek(0)
        os.write(2, output.read())


def _refuse_one_of_many(environ: Mapping[str, str]) -> None:
    """UserError where a scheduler started several tasks and none has a rank: each would train alone."""
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environ.get(name, "1") not in ("", "1"):
            fix = f"set {', '.join((*_NUMBERS, *_ADDRESS))}, or unset {name} to train alone"
            raise UserError(problem(name, environ[name], "this is one of several tasks, but RANK is not set", fix=fix))


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Choose the device of a rank and make it current; `auto` is CUDA where there is any. UserError without a GPU."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not available):
        return torch.device("cpu")
    if local_rank >= available:
        why = f"local rank {local_rank} needs GPU {local_rank}, but torch sees {available}"
        fix = (
            f"start at most {available} ranks per node"
            if available
            else 'parallel.device = "cpu", or a torch built for CUDA'
        )
        raise UserError(problem("parallel.device", wanted, why, allowed="auto, cpu", fix=fix))
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def all_reduce_stats(world: World, vector: Sequence[float]) -> list[float]:
    """Sum each number over the ranks in float64: the step's only exchange besides the gradients."""
    if world.world_size == 1:
        return list(vector)
    numbers = torch.tensor(vector, dtype=torch.float64, device=world.device)
    dist.all_reduce(numbers)
    return [float(number) for number in numbers.tolist()]


def _ranks(environ: Mapping[str, str]) -> tuple[int, int, int]:
    fix = "start with torchrun, or unset all of " + ", ".join(_NUMBERS)
    lines = [f"{name} is missing in the environment: {fix}" for name in (*_NUMBERS, *_ADDRESS) if name not in environ]
    for name in (*_NUMBERS, "MASTER_PORT"):
        if name in environ and not environ[name].isdecimal():
            lines.append(problem(name, environ[name], "is not a number", allowed=">= 0", fix=fix))
        elif name in environ and (len(environ[name]) > 10 or int(environ[name]) > LARGEST[name]):
            lines.append(problem(name, environ[name], "is too large", allowed=f"<= {LARGEST[name]}", fix=fix))
    if lines:
        raise UserError(lines)
    rank, world_size, local_rank = (int(environ[name]) for name in _NUMBERS)
    if rank >= world_size:
        raise UserError(
            problem("RANK", rank, f"is not below WORLD_SIZE = {world_size}", allowed=f"0 .. {world_size - 1}", fix=fix)
        )
    return rank, world_size, local_rank
