"""Runs of the tiny Task: their settings, attempts at them in this process, and what they leave."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.written import manifests_of, read_checkpoint
from tests.lab.training import config as tiny_config
from trainer.__main__ import main
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import Manifest
from trainer.checkpoint.load.parts import read_manifest
from trainer.metrics.reader import read_events, read_steps
from trainer.storage import open_store

LR = 1e-2


def write_config(folder: Path, steps: int, micro_batch: int, every_steps: int = 20, more: str = "") -> Path:
    """Settings of a run in `folder`; `more` are further tables."""
    text = tiny_config(f"{folder}/run", steps=steps, micro_batch=micro_batch)
    path = folder / "config.toml"
    path.write_text(text.replace("every_steps = 20", f"every_steps = {every_steps}") + more)
    return path


def train(config: Path, *sets: str, process: int = 1) -> int:
    """One attempt, as in a process whose random streams begin where no other's do."""
    random.seed(process)
    np.random.seed(process)
    return main(["train", str(config), *[word for pair in sets for word in ("--set", pair)]])


def records(folder: Path) -> list[dict[str, Any]]:
    return read_steps(open_store(str(folder)))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(open_store(str(folder))) if event["event"] == kind]


def commits(folder: Path) -> list[ManifestId]:
    return manifests_of(open_store(str(folder)))


def newest(folder: Path) -> tuple[Manifest, dict[str, bytes]]:
    """The last commit and the bytes of all its tensors."""
    store = open_store(str(folder))
    manifest = read_manifest(store, commits(folder)[-1])
    tensors = read_checkpoint(store, manifest)
    return manifest, {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
