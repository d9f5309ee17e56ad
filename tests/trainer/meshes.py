"""One small run, odd in every shape, on meshes of ranks: its losses, and the bytes of its checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from tests.fork_server import ForkServer
from tests.trainer.token_sets import write_token_set
from trainer.checkpoint.lineage.lease import committed
from trainer.checkpoint.load.latest import read_checkpoint
from trainer.checkpoint.load.parts import Places, ignore_event, read_manifest
from trainer.metrics.reader import read_steps
from trainer.storage import open_store

MESHES = {"one": (1, 1), "ddp2": (2, 1), "fsdp2": (2, 2), "fsdp3": (3, 3), "hsdp2x2": (4, 2)}
"""Name to ranks and shards."""
STEPS = 8
CONFIG = """
[task]
name = "language_model"
data = "{folder}/tokens"
seq_len = 16
[task.model]
width = 12
layers = 2
heads = 2
kv_heads = 1
hidden = 17
vocab_size = 331
tied = {tied}
dropout = 0.1
[run]
uri = "{folder}/unused"
[train]
steps = 8
global_batch = 12
micro_batch = 1
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


class MeshRuns:
    """Attempts at runs in one folder; a run's name is its folder."""

    def __init__(self, server: ForkServer, folder: Path, tied: bool = True) -> None:
        self.server, self.folder = server, folder
        text = random.Random(7).randbytes(4000)
        write_token_set(folder / "tokens", {"train": text[:3500], "val": text[3500:]})
        self.config = folder / "config.toml"
        self.config.write_text(CONFIG.format(folder=folder, tied=str(tied).lower()))

    def words(self, run: str, mesh: str, *sets: str) -> list[str]:
        pairs = (f"run.uri={self.folder}/{run}", f"parallel.shard={MESHES[mesh][1]}", *sets)
        return ["train", str(self.config), *[word for pair in pairs for word in ("--set", pair)]]

    def train(self, run: str, mesh: str, *sets: str) -> None:
        """One attempt, to its end."""
        job = self.server.start(self.words(run, mesh, *sets), MESHES[mesh][0])
        assert job.wait() == [0] * MESHES[mesh][0], job.said()

    def steps(self, run: str) -> list[tuple[float, float, float]]:
        """Loss, norm of the gradient and loss of the evaluation, where there was one, by step."""
        records = read_steps(open_store(f"{self.folder}/{run}"))
        return [(one["loss"], one["grad_norm"], one.get("eval_loss", 0.0)) for one in records]

    def tensors(self, run: str) -> dict[str, Tensor]:
        """All tensors of the newest checkpoint, whole."""
        store = open_store(f"{self.folder}/{run}")
        manifest = read_manifest(store, max(committed(store)))
        return read_checkpoint(Places(store), manifest, want=lambda name: True, on_event=ignore_event)


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)
