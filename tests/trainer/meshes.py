"""One small run, odd in every shape, on meshes of ranks: its losses, and the bytes of its checkpoints."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.written import read_checkpoint
from tests.fork_server import ForkServer
from tests.trainer.token_sets import write_token_set
from trainer.checkpoint.lineage.lease import committed
from trainer.checkpoint.load.parts import read_manifest
from trainer.metrics.reader import read_steps
from trainer.storage import open_store

MESHES = {
    "one": (1, 1, 1),
    "ddp2": (2, 1, 1),
    "fsdp2": (2, 2, 1),
    "fsdp3": (3, 3, 1),
    "hsdp2x2": (4, 2, 1),
    "tp2": (2, 1, 2),
    "fsdp2xtp2": (4, 2, 2),
    "fsdp3xtp2": (6, 3, 2),
    "ddp2xtp2": (4, 1, 2),
    "hsdp2x2xtp2": (8, 2, 2),
}
"""Name to ranks, shards and tensor ranks."""
STEPS = 8
CONFIG = """
[task]
name = "language_model"
data = "{folder}/tokens"
seq_len = 16
[task.model]
width = 20
layers = 2
heads = 10
kv_heads = 2
hidden = 22
vocab_size = 331
tied = {tied}
dropout = {dropout}
[run]
uri = "{folder}/unused"
[train]
steps = 8
global_batch = 12
micro_batch = {micro_batch}
grad_clip = 0.3
[eval]
every = 3
batches = 1
[optimizer]
lr = 0.02
[schedule]
total_steps = 8
[checkpoint]
every_steps = 4
[parallel]
device = "cpu"
"""


Step = tuple[float, float, float]
"""Loss, norm of the gradient and loss of the evaluation, 0.0 where there was none."""


class MeshRuns:
    """Attempts at runs in one folder; a run's name is its folder."""

    def __init__(
        self, server: ForkServer, folder: Path, tied: bool = True, dropout: float = 0.1, micro_batch: int = 1
    ) -> None:
        self.server, self.folder = server, folder
        self._done: set[str] = set()
        text = random.Random(7).randbytes(4000)
        write_token_set(folder / "tokens", {"train": text[:3500], "val": text[3500:]})
        self.config = folder / "config.toml"
        self.config.write_text(
            CONFIG.format(folder=folder, tied=str(tied).lower(), dropout=dropout, micro_batch=micro_batch)
        )

    def words(self, run: str, mesh: str, *sets: str) -> list[str]:
        _, shard, tensor = MESHES[mesh]
        pairs = (f"run.uri={self.folder}/{run}", f"parallel.shard={shard}", f"parallel.tensor={tensor}", *sets)
        return ["train", str(self.config), *[word for pair in pairs for word in ("--set", pair)]]

    def train(self, run: str, mesh: str, *sets: str) -> None:
        """One attempt, to its end."""
        job = self.server.start(self.words(run, mesh, *sets), MESHES[mesh][0])
        assert job.wait() == [0] * MESHES[mesh][0], job.said()

    def once(self, run: str, mesh: str, *sets: str) -> None:
        """As `train`, unless that was done."""
        if run not in self._done:
            self.train(run, mesh, *sets)
            self._done.add(run)

    def copy(self, run: str, to: str) -> None:
        shutil.copytree(self.folder / run, self.folder / to)

    def forget(self, run: str, after: int) -> None:
        """Remove the commits of later steps, as if the run had been killed before them."""
        store = open_store(f"{self.folder}/{run}")
        for commit in committed(store):
            if commit.step > after:
                store.delete(commit.key)

    def steps(self, run: str) -> list[Step]:
        records = read_steps(open_store(f"{self.folder}/{run}"))
        return [(one["loss"], one["grad_norm"], one.get("eval_loss", 0.0)) for one in records]

    def records(self, run: str, *fields: str) -> list[tuple[Any, ...]]:
        """These fields of each step's record."""
        return [tuple(one[field] for field in fields) for one in read_steps(open_store(f"{self.folder}/{run}"))]

    def tensors(self, run: str) -> dict[str, Tensor]:
        """All tensors of the newest checkpoint, whole."""
        store = open_store(f"{self.folder}/{run}")
        manifest = read_manifest(store, max(committed(store)))
        return read_checkpoint(store, manifest)


def assert_losses_of_one_rank(mine: Sequence[Step], ones: Sequence[Step]) -> None:
    """Up to rounding, for sums in another order: of losses 8e-8 was seen, of norms, which add it up over all weights, 8e-6."""
    for (loss, norm, eval_loss), (one_loss, one_norm, one_eval_loss) in zip(mine, ones, strict=True):
        assert (loss, eval_loss) == pytest.approx((one_loss, one_eval_loss), rel=1e-5)
        assert norm == pytest.approx(one_norm, rel=1e-4)


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
