"""A training of microseconds per step that uses Python's and NumPy's random streams and can end its own capacity."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainer.config import Section
from trainer.tasks import Batch, Ids, LossSum, Task

WIDTH = 4


class TinyOptions(Section):
    samples: int = 64
    strike: int = 0
    """SIGUSR1 arrives with this training batch of the attempt, as a scheduler sends it; 0 for never."""
    hold: str = ""
    """A file that training waits for before its 100th batch of an attempt: what a test does until then falls into the run."""
    reads: str = ""
    """A folder with a file for each rank, of which each training batch reads: a storage that a test can make slow."""
    held_out: Literal["0", "nan", "inf", "-inf"] = "0"
    """What is added to the loss of every held-out sample."""
    spoiled: int = -1
    """A training sample whose loss counts `spoil` times; its number, -1 for none."""
    spoil: Literal["nan", "1000"] = "nan"


class Tiny(Task):
    """Two small layers learn a sum from samples with noise of the process's own random streams on them."""

    Options: ClassVar[type[Section]] = TinyOptions

    def open(self, cache_dir: Path) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.inputs = torch.randn(self.options.samples, WIDTH, generator=generator)
        self.batches = 0

    @property
    def train_samples(self) -> int:
        return len(self.inputs)

    @property
    def eval_samples(self) -> int:
        return len(self.inputs)

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def train_batch(self, ids: Ids) -> Batch:
        self.batches += 1
        if self.batches == self.options.strike:
            signal.raise_signal(signal.SIGUSR1)
        while self.batches == 100 and self.options.hold and not Path(self.options.hold).exists():
            time.sleep(0.01)
        if self.options.reads:
            Path(self.options.reads, os.environ["RANK"]).read_bytes()
        batch = self._batch(ids, 0.0)
        noise = np.random.standard_normal(WIDTH).astype(np.float32) * random.random()
        weight = torch.ones(len(ids), 1)
        weight[torch.from_numpy(ids == self.options.spoiled)] = float(self.options.spoil)
        return batch | {"x": batch["x"] + torch.from_numpy(noise), "weight": weight}

    def eval_batch(self, ids: Ids) -> Batch:
        return self._batch(ids, float(self.options.held_out))

    def _batch(self, ids: Ids, added: float) -> Batch:
        inputs = self.inputs[torch.from_numpy(ids)]
        targets, weight = inputs.sum(dim=1, keepdim=True), torch.ones(len(ids), 1)
        return {"x": inputs, "y": targets, "added": torch.full((len(ids),), added), "weight": weight}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> LossSum:
        squares = ((model(batch["x"]).float() - batch["y"]).square() * batch["weight"]).sum()
        return LossSum(squares + batch["added"].sum(), len(batch["x"]))

    def tokens_per_sample(self) -> int:
        return 1

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return []

    def flops_per_token(self, model: nn.Module) -> float:
        return 6.0 * sum(parameter.numel() for parameter in model.parameters())

    def fingerprint(self) -> dict[str, Any]:
        # Another kind of processor may draw and add up to other last bits.
        return {"data": {"samples": self.options.samples, "sum": round(float(self.inputs.sum()), 2)}}
