"""A disk that fills up under a training: saves fail in one clear line, training goes on, and what was committed stays."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.checkpoint.saving import small_disk
from tests.torture.conftest import Bench
from tests.torture.small_run import assert_same_training, committed, committed_lines, events
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.storage import open_store

pytestmark = pytest.mark.slow

DISK_MB = 4
"""A checkpoint of the small training takes a quarter of a megabyte."""


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return ballast
    raise AssertionError("the disk has no end")


def test_full_disk_under_run_costs_saves_but_not_the_training(bench: Bench, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK_MB) as disk:
        uri = f"{disk}/run"
        job = bench.start(uri, {"train.steps": 1_000_000})
        job.wait_for("checkpoint committed: step 5,")
        ballast = fill(disk)
        job.wait_for("checkpoint failed:")
        store = open_store(uri, create=False)
        newest = committed(store)[-1]
        assert verify_checkpoint(store, newest).ok
        ballast.unlink()
        before = len(committed_lines(job.said()))
        job.wait_for_lines("checkpoint committed:", before + 1)
        job.send(signal.SIGTERM)
        assert set(job.wait()) == {85}, job.said()
        failed = events(store, "checkpoint_failed")
        assert all("\n" not in event["detail"] and "space" in event["detail"] for event in failed), failed
        assert failed
        assert "Traceback" not in job.said()
        assert_same_training(store, bench.reference(), 10)
