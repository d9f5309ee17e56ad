"""A training of a few milliseconds per step, and what a test wants to know about a run that it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.checkpoint.written import read_checkpoint
from trainer.checkpoint.format.layout import ATTEMPTS, MANIFESTS, ManifestId
from trainer.checkpoint.load.parts import read_manifest
from trainer.metrics.reader import read_events, read_steps
from trainer.metrics.records import EVENTS, STEPS
from trainer.storage import ObjectStore
from trainer.storage.local import LocalStore

EVERY_STEPS = 5

_CONFIG = """
[run]
uri = "-"
[task]
name = "language_model"
data = "{tokens}"
seq_len = 16
[task.model]
width = 16
layers = 1
heads = 2
kv_heads = 1
hidden = 32
dropout = 0.1
[train]
steps = 40
global_batch = {global_batch}
micro_batch = 2
[optimizer]
lr = 1e-2
[schedule]
warmup_steps = 5
[parallel]
timeout_s = 600.0
[checkpoint]
every_steps = {every}
keep_last = 2
vote_timeout_s = 600.0
"""


def write_config(path: Path, tokens: Path, *, global_batch: int = 8) -> Path:
    path.write_text(_CONFIG.format(tokens=tokens, global_batch=global_batch, every=EVERY_STEPS))
    return path


def train_words(config: Path, uri: str, sets: Mapping[str, object] | None = None) -> list[str]:
    """Arguments of `python -m trainer` that train the run at `uri`."""
    wishes = {"run.uri": uri, **(sets or {})}
    return ["train", str(config), *(word for key, value in wishes.items() for word in ("--set", f"{key}={value}"))]


def bits(record: Mapping[str, Any]) -> bytes:
    """What must not differ by a bit between two histories of the same training."""
    return struct.pack("<qdddq", *(record[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")))


def history(store: ObjectStore) -> list[bytes]:
    """The merged records of all attempts, as bits."""
    return [bits(record) for record in read_steps(store)]


def events(store: ObjectStore, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(store) if event["event"] == kind]


def own_records(store: ObjectStore, generation: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and events that one attempt made durable, in its order."""
    return _lines(store, f"{STEPS}{generation:06d}-"), _lines(store, f"{EVENTS}{generation:06d}-")


def committed(store: ObjectStore) -> list[ManifestId]:
    """All commits, oldest first by step: in a history without zombies the last one is the newest checkpoint."""
    found = [manifest for info in store.list(MANIFESTS) if (manifest := ManifestId.of_key(info.key))]
    return sorted(found, key=lambda manifest: (manifest.step, manifest.generation))


def newest_step(store: ObjectStore) -> int:
    return max((manifest.step for manifest in committed(store)), default=0)


def attempts_stored(store: ObjectStore) -> set[str]:
    """Names of all saves of which an object is stored, committed or not."""
    return {info.key.split("/")[1] for info in store.list(ATTEMPTS)}


def saves_begun(store: ObjectStore) -> set[str]:
    """The same, at once: in a folder it shows when a save's first file is about to get its name."""
    if isinstance(store, LocalStore):
        # The folder comes with the first save and goes with the last that is pruned, at any moment between two calls.
        with contextlib.suppress(FileNotFoundError):
            return set(os.listdir(store.root / ATTEMPTS))
        return set()
    return attempts_stored(store)


def weights(store: ObjectStore, manifest: ManifestId) -> dict[str, bytes]:
    """Model and optimizer of a checkpoint, every byte verified; without what belongs to single ranks."""
    tensors = read_checkpoint(store, read_manifest(store, manifest), lambda name: not name.startswith("own/"))
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def began_at(said: str) -> int | None:
    """The step from which an attempt began, going by what its rank 0 said; None when it did not get so far."""
    match = re.search(r"^(?:started|resumed): step (\d+)", said, re.MULTILINE)
    return int(match[1]) if match else None


def committed_lines(said: str) -> list[int]:
    """The steps that rank 0 called committed."""
    return [int(step) for step in re.findall(r"^checkpoint committed: step (\d+)", said, re.MULTILINE)]


def _lines(store: ObjectStore, prefix: str) -> list[dict[str, Any]]:
    bodies = (store.read(info.key)[0] for info in store.list(prefix))
    return [json.loads(line) for body in bodies for line in body.splitlines()]


def assert_same_training(store: ObjectStore, reference: Sequence[bytes], at_least: int) -> None:
    """The run's records have no gap and equal the reference's to the last bit, as far as both go: `at_least` steps."""
    found = history(store)
    steps = [record["step"] for record in read_steps(store)]
    assert steps == list(range(1, len(steps) + 1))
    assert min(len(found), len(reference)) >= at_least, f"only {len(found)} steps to compare"
    different = [step for step, pair in enumerate(zip(found, reference, strict=False), start=1) if pair[0] != pair[1]]
    assert not different, f"steps {different[:10]} differ from the uninterrupted run"
