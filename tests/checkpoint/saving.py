"""What the save tests share: one rank's Checkpointer on a folder, states to save, and a hand on its writer process."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from tests.fork_server import writers_of
from tests.processes import wait_for
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.save.flight import FinishedSave
from trainer.checkpoint.save.saver import Checkpointer
from trainer.config import CheckpointConfig
from trainer.parallel.shards import Axis
from trainer.parallel.votes import StoreVotes, VoteBox, VoteTimeout
from trainer.storage import ObjectStore
from trainer.storage.folder import Folder
from trainer.storage.keys import PRIVATE

PATIENCE_S = 300.0
"""Longest wait of a test for something that takes well under a second on a calm machine."""

JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send to every process of a job."""


def sample_tensors(seed: int = 1, rows: int = 300) -> dict[str, Tensor]:
    """A state with every kind of tensor: large, small, empty, of no dimension, of one bit, of 8 and 16 bit floats."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(rows, 257, generator=generator),
        "model/norm": torch.randn(257, generator=generator).bfloat16(),
        "model/mask": torch.rand(5, 3, generator=generator) > 0.5,
        "model/scaled": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
        "model/transposed": torch.randn(20, 30, generator=generator).t(),
        "optim/step": torch.tensor(float(seed)),
        "optim/empty": torch.zeros(0, 4),
    }


ALL = sample_tensors()


def save_one(saver: Checkpointer, step: int, tensors: Mapping[str, Tensor] = ALL, **how: Any) -> FinishedSave:
    """How a save ended that nothing else is beside."""
    saver.save(step, tensors, {}, {}, **how)
    (outcome,) = saver.wait(PATIENCE_S)
    return outcome


@dataclass
class Events:
    """Collects what a Checkpointer reports."""

    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.seen.append((kind, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for seen, fields in self.seen if seen == kind]


class VotesWithout(StoreVotes):
    """Votes in which, once `lost` is a rank, its vote on a save is waited for in vain, and the others' are there."""

    lost: int | None = None

    def gather(self, topic: str, timeout: float, **how: Any) -> dict[int, dict[str, Any]]:
        if self.lost is None or not topic.endswith("/votes"):
            return super().gather(topic, timeout, **how)
        super().gather(topic, timeout, **{**how, "ranks": [r for r in range(self.world_size) if r != self.lost]})
        raise VoteTimeout(topic, [self.lost], timeout)


@contextmanager
def checkpointer(
    store: ObjectStore,
    events: Events,
    *,
    lease: Lease | None = None,
    votes: VoteBox | None = None,
    rank: int = 0,
    world_size: int = 1,
    parent: ManifestId | None = None,
    mesh: Sequence[Axis] | None = None,
    **options: Any,
) -> Iterator[Checkpointer]:
    """One rank's Checkpointer, with a lease of its own on rank 0 unless one is given; closed afterwards."""
    if lease is None:
        lease = Lease.acquire(store, "this test")
        lease.record_parent(parent)
    saver = Checkpointer(
        store,
        votes or StoreVotes(HashStore(), world_size),
        rank=rank,
        mesh=mesh or [Axis("rank", world_size, rank)],
        generation=lease.generation,
        lease=lease if rank == 0 else None,
        options=CheckpointConfig(**{"vote_timeout_s": PATIENCE_S, **options}),
        parent=parent,
        on_event=events,
    )
    try:
        yield saver
    finally:
        saver.close()


def writer_pid() -> int:
    """The one writer process of this process, once it is there and has taken its name and its signals."""
    return wait_for(lambda: next((pid for pid in writers_of(os.getpid()) if _ignores_all(pid)), 0))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still inside the block; a process that was killed there is none to wake."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)


@contextmanager
def held_up(store: ObjectStore) -> Iterator[Callable[[], bool]]:
    """Inside the block large objects are written but get no name; what it gives tells whether one has come that far."""
    root = Path(store.uri)
    with Folder(root).locked():
        yield lambda: any(file.stat().st_size for file in (root / PRIVATE).iterdir())


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system that is really this small; skips the test where this user may not mount one."""
    from tests.conftest import require

    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={megabytes}m".encode())
    require(not failed, f"may not mount a tmpfs here: {os.strerror(ctypes.get_errno())}; run as root")
    try:
        yield folder
    finally:
        libc.umount2(bytes(folder), 2)


def _ignores_all(pid: int) -> bool:
    """All of the job's signals: a busy machine may show the process between one and the next."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            ignored = int(line.split()[1], 16)
            return all(ignored >> (number - 1) & 1 for number in JOB_SIGNALS)
    return False
