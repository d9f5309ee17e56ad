"""Runs with a spoiled sample: skipped or rolled back, recorded, bounded, and the same after an interruption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.trainer.test_trainer_resume import counters, newest
from tests.trainer.tiny_runs import commits, events, records, train, write_config
from tests.trainer.tiny_task import Tiny
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.lineage.lease import Lease, read_lease
from trainer.data import order
from trainer.storage import open_store

BATCH, SAMPLES, SEED = 4, 64, 1
SPOILED_STEP = 6
SPOILED = int(order.sample_ids(SEED, (SPOILED_STEP - 1) * BATCH, 1, SAMPLES)[0])
"""The first sample of step 6: it comes again 16 steps later, in the next epoch."""
SPOIL = (f"task.spoiled={SPOILED}", "schedule.total_steps=12")
SKIP = (*SPOIL, "bad_loss.action=skip")
ROLL_BACK = (*SPOIL, "bad_loss.action=roll_back", "bad_loss.rollback_steps=2", "bad_loss.skip_batches=1")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, 12, 4, every_steps=1000)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The samples of every training batch of this process, in order."""
    batches: list[list[int]] = []
    original = Tiny.train_batch

    def train_batch(self: Tiny, ids: Any) -> Any:
        batches.append(ids.tolist())
        return original(self, ids)

    monkeypatch.setattr(Tiny, "train_batch", train_batch)
    return batches


def positions(start: int, count: int) -> list[int]:
    return order.sample_ids(SEED, start * BATCH, count * BATCH, SAMPLES).tolist()


def test_bad_step_stops_the_run_by_default(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config, *SPOIL) == 1
    assert capsys.readouterr().err.startswith(f"step {SPOILED_STEP}: loss = nan, gradient norm = nan: ")
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert commits(tmp_path / "run") == []


@pytest.mark.slow
def test_skipped_step_is_recorded_and_applies_nothing(config: Path, tmp_path: Path) -> None:
    assert train(config, *SKIP, "train.steps=6") == 0
    assert math.isnan(records(tmp_path / "run")[-1]["loss"])
    assert [record["step"] for record in records(tmp_path / "run") if record.get("skipped")] == [6]
    (event,) = events(tmp_path / "run", "step_skipped")
    assert (event["step"], event["in_row"], event["in_run"], event["detail"]) == (6, 1, 1, "not finite")
    _, after = newest(tmp_path / "run")
    assert train(config, *SPOIL, "train.steps=5", f"run.uri={tmp_path}/before") == 0
    _, before = newest(tmp_path / "before")
    learnt = [name for name in before if name.startswith(("model/", "optim/"))]
    assert learnt
    assert all(after[name] == before[name] for name in learnt)


@pytest.mark.slow
@pytest.mark.parametrize("strike", [SPOILED_STEP, SPOILED_STEP + 1])
def test_run_interrupted_at_a_skip_ends_as_the_uninterrupted(config: Path, tmp_path: Path, strike: int) -> None:
    # Few steps and noisy ones: six deviations would also be met by an honest step.
    spike = ('task.spoil="1000"', "bad_loss.spike_deviations=50.0", "bad_loss.spike_window=8")
    assert train(config, *SKIP, *spike, f"run.uri={tmp_path}/reference") == 0
    assert train(config, *SKIP, *spike, f"task.strike={strike}") == 85
    assert train(config, *SKIP, *spike, process=2) == 0
    (expected, expected_bytes), (resumed, resumed_bytes) = newest(tmp_path / "reference"), newest(tmp_path / "run")
    assert counters(resumed) == counters(expected)
    assert expected.state["bad_loss"]["skipped"] == 1
    assert len(expected.state["bad_loss"]["losses"]) == 8
    assert resumed_bytes == expected_bytes


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_skipped_in_row", "max_skipped"])
def test_run_that_would_skip_on_and_on_ends_with_1(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    always = ("optimizer.lr=1e38", "train.grad_clip=0.0", "bad_loss.action=skip", f"bad_loss.{limit}=3")
    assert train(config, *always) == 1
    assert f"bad_loss.{limit}" in capsys.readouterr().err
    assert len(events(tmp_path / "run", "step_skipped")) == 3


def begin(config: Path, *sets: str) -> None:
    """Four steps, so that a roll back from the sixth goes to the fourth: saves beside the training end at their own time."""
    assert train(config, *ROLL_BACK, "train.steps=4", *sets) == 0


@pytest.mark.slow
def test_roll_back_goes_on_before_bad_step_with_later_samples(
    config: Path, tmp_path: Path, taken: list[list[int]]
) -> None:
    run = tmp_path / "run"
    begin(config)
    assert train(config, *ROLL_BACK) == 0
    assert taken[:6] == [positions(step, 1) for step in range(6)]
    # The batches of the steps 5 and 6 do not come again, and one more is passed over.
    assert taken[6:] == [positions(step, 1) for step in range(7, 15)]
    (event,) = events(run, "rolled_back")
    assert (event["step"], event["to_step"], event["from_attempt"], event["attempt"]) == (6, 4, 2, 3)
    assert (event["data_offset"], event["in_run"], event["detail"]) == (3 * BATCH, 1, "not finite")
    assert math.isnan(event["loss"])
    assert [(record["step"], record["attempt"]) for record in records(run)] == [
        (step, 1 if step <= 4 else 3) for step in range(1, 13)
    ]
    manifest, _ = newest(run)
    assert (manifest.parent, manifest.state["cursor"]) == (ManifestId(1, 4), 15 * BATCH)
    assert commits(run) == [ManifestId(1, 4), ManifestId(3, 4), ManifestId(3, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_run_interrupted_after_a_roll_back_ends_as_uninterrupted(config: Path, tmp_path: Path, precision: str) -> None:
    sets = (f"precision.mode={precision}", "precision.fp16_initial_scale=1024.0")
    begin(config, f"run.uri={tmp_path}/reference", *sets)
    assert train(config, *ROLL_BACK, f"run.uri={tmp_path}/reference", *sets) == 0
    begin(config, *sets)
    assert train(config, *ROLL_BACK, "task.strike=5", *sets) == 85
    assert commits(tmp_path / "run")[-1] == ManifestId(3, 7)
    assert train(config, *ROLL_BACK, *sets, process=2) == 0
    (expected, expected_bytes), (resumed, resumed_bytes) = newest(tmp_path / "reference"), newest(tmp_path / "run")
    assert (expected.step, expected.generation, resumed.step, resumed.generation) == (12, 3, 12, 4)
    assert counters(resumed) == counters(expected)
    assert resumed.state["bad_loss"]["rollbacks"] == 1
    assert resumed_bytes == expected_bytes


@pytest.mark.slow
def test_run_that_would_roll_back_on_and_on_ends_with_1(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(config, "task.samples=4", "task.spoiled=-1")
    # From now on every batch has the spoiled sample.
    again = (*ROLL_BACK, "task.samples=4", "task.spoiled=0", "bad_loss.max_rollbacks=2")
    assert train(config, *again) == 1
    assert "bad_loss.max_rollbacks" in capsys.readouterr().err
    rolled_back = events(tmp_path / "run", "rolled_back")
    assert [event["in_run"] for event in rolled_back] == [1, 2]
    assert [event["data_offset"] for event in rolled_back] == [2 * BATCH, 4 * BATCH], "no sample is taken twice"
    assert train(config, *again) == 1, "the count is part of the checkpoint"
    assert len(events(tmp_path / "run", "rolled_back")) == 2


@pytest.mark.slow
def test_roll_back_of_a_run_that_a_newer_job_took_ends_with_86(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(config)
    original = Tiny.train_batch

    def train_batch(self: Tiny, ids: Any) -> Any:
        if SPOILED in ids:
            Lease.acquire(open_store(f"{tmp_path}/run"), "a newer job")
        return original(self, ids)

    monkeypatch.setattr(Tiny, "train_batch", train_batch)
    assert train(config, *ROLL_BACK) == 86
    lease = read_lease(open_store(f"{tmp_path}/run"))
    assert lease is not None
    assert (lease.generation, lease.owner) == (3, "a newer job")


def test_roll_back_without_a_checkpoint_ends_with_1(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, *ROLL_BACK) == 1
    assert "no checkpoint to roll back to" in capsys.readouterr().err
    assert commits(tmp_path / "run") == []


@pytest.mark.slow
def test_two_ranks_roll_back_together(fork_server: ForkServer, config: Path, tmp_path: Path) -> None:
    begin(config)
    sets = [word for pair in (*ROLL_BACK, "train.micro_batch=2") for word in ("--set", pair)]
    assert fork_server.start(["train", str(config), *sets], 2).wait() == [0, 0]
    (event,) = events(tmp_path / "run", "rolled_back")
    assert (event["step"], event["to_step"]) == (6, 4)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 13))
    assert newest(tmp_path / "run")[0].state["progress"]["data_offset"] == 3 * BATCH
