"""What a restart must not change: what a checkpoint holds beside the weights, early stopping, schedule, exit codes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.stores import AWAY, away
from tests.lab.faulty_proxy import Answer, FaultyProxy
from tests.lab.servers import S3Place
from tests.processes import wait_until
from tests.trainer.tiny_runs import LR, commits, events, newest, records, train, write_config
from trainer.checkpoint.format.layout import ATTEMPTS, LEASE, MANIFESTS, ManifestId
from trainer.checkpoint.format.records import Manifest
from trainer.checkpoint.load.parts import read_manifest
from trainer.config import ScheduleConfig
from trainer.step import schedule
from trainer.storage import open_store

EARLY = ("eval.every=2", "eval.patience=2", "eval.min_delta=100.0", "train.steps=20")
"""The first evaluation is a gain, no later one gains 100: evaluations 4 and 6 use the patience up, so step 6 is the last."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, 8, 4, every_steps=1000, more="[eval]\nevery = 3\nbatches = 2\n")


def counters(manifest: Manifest) -> dict[str, Any]:
    """All of the state in a manifest but the time that the training took."""
    progress = {name: value for name, value in manifest.state["progress"].items() if name != "wall_s"}
    return {**manifest.state, "progress": progress}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_interrupted_run_ends_with_every_byte_of_uninterrupted(config: Path, tmp_path: Path, precision: str) -> None:
    sets = (f"precision.mode={precision}", "precision.fp16_initial_scale=262144.0", "eval.min_delta=100.0")
    assert train(config, f"run.uri={tmp_path}/reference", *sets) == 0
    # Evaluations follow steps 3 and 6; between 7 and the end nothing overwrites what was restored.
    assert train(config, "task.strike=7", *sets) == 85
    assert commits(tmp_path / "run") == [ManifestId(1, 7)]
    assert train(config, *sets, process=2) == 0
    (expected, expected_bytes), (found, found_bytes) = newest(tmp_path / "reference"), newest(tmp_path / "run")
    assert (expected.step, found.step, found.generation) == (8, 8, 2)
    assert counters(found) == counters(expected)
    progress = expected.state["progress"]
    assert progress["evals_without_gain"] == 1
    assert 0 < progress["last_eval_loss"] != progress["best_eval_loss"] > 0
    assert found.about["eval_loss"] == progress["last_eval_loss"]
    assert found_bytes == expected_bytes
    if precision == "fp16":
        assert expected.state["scaler"]["scale"] < 262144.0, "no step overflowed: nothing that a fresh scaler lacks"
        assert expected.state["scaler"]["_growth_tracker"] > 1


@pytest.mark.slow
def test_prolonged_run_keeps_schedule_and_rate_and_records_it(config: Path, tmp_path: Path) -> None:
    assert train(config, "task.strike=2") == 85
    assert train(config, "train.steps=11") == 0
    rates = [record["lr"] for record in records(tmp_path / "run")]
    assert rates == [schedule.lr_at(step, ScheduleConfig(total_steps=8), 8, LR) for step in range(1, 12)]
    assert rates[6] > rates[7] > rates[8] == rates[9] == rates[10]
    assert events(tmp_path / "run", "config_changed")[-1]["changes"]["train.steps"] == [8, 11]


@pytest.mark.slow
def test_patience_counts_on_after_a_stop_and_can_be_raised(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(config, "task.strike=5", *EARLY) == 85
    assert train(config, *EARLY, process=2) == 0
    assert commits(run) == [ManifestId(1, 5), ManifestId(2, 6)]
    assert train(config, *EARLY) == 0
    assert len(records(run)) == 6
    assert commits(run) == [ManifestId(1, 5), ManifestId(2, 6)]
    assert "stopped improving" in events(run, "stopped")[-1]["detail"]
    assert train(config, *EARLY, "eval.patience=3") == 0
    assert len(records(run)) == 8


def test_stopped_job_says_what_stopped_it_and_how_to_go_on(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "task.strike=2") == 85
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "SIGUSR1" in line] == [
        "notice: SIGUSR1: saving after this step",
        "stopped: step 2, saved_step 2, exit_code 85, SIGUSR1; start the same command again to go on",
    ]
    (stopped,) = events(tmp_path / "run", "stopped")
    assert (stopped["step"], stopped["saved_step"], stopped["exit_code"]) == (2, 2, 85)


@pytest.mark.slow
def test_stop_file_stops_run_and_must_be_gone_before_it_goes_on(config: Path, tmp_path: Path) -> None:
    run, stop, go = tmp_path / "run", tmp_path / "stop", tmp_path / "go"
    sets = ("train.steps=110", f"task.hold={go}", f"interrupt.stop_uri={stop}", "interrupt.poll_s=0.005")

    def stop_it() -> None:
        wait_until(lambda: events(run, "started"))
        stop.touch()
        wait_until(lambda: events(run, "notice"))
        go.touch()

    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_it)
        assert train(config, *sets) == 85
        stopping.result()
    stopped_at = records(run)[-1]["step"]
    assert commits(run) == [ManifestId(1, stopped_at)]
    assert stopped_at <= 100
    assert train(config, *sets) == 2
    stop.unlink()
    assert train(config, *sets) == 0
    assert [event["step"] for event in events(run, "resumed")] == [stopped_at]


def test_a_notice_in_the_last_step_of_all_is_no_interruption(config: Path, tmp_path: Path) -> None:
    assert train(config, *EARLY, "task.strike=6") == 0
    assert commits(tmp_path / "run") == [ManifestId(1, 6)]


@pytest.mark.parametrize("held_out", ["nan", "inf", "-inf"])
def test_an_evaluation_without_a_number_is_no_gain_and_no_crash(config: Path, tmp_path: Path, held_out: str) -> None:
    assert train(config, *EARLY, f'task.held_out="{held_out}"') == 0
    (commit,) = commits(tmp_path / "run")
    assert commit == ManifestId(1, 4), "two evaluations without gain use the patience up"
    progress = read_manifest(open_store(f"{tmp_path}/run"), commit).state["progress"]
    assert (progress["best_eval_loss"], progress["last_eval_loss"], progress["evals_without_gain"]) == (None, None, 2)


@pytest.mark.slow
def test_a_derived_interval_keeps_the_least_time_between_saves(config: Path, tmp_path: Path) -> None:
    eager = ("checkpoint.every_steps=0", "checkpoint.mtbf_hours=1e-6", "train.steps=30", "eval.every=0")
    assert train(config, *eager, "checkpoint.least_seconds=0.0", f"run.uri={tmp_path}/eager") == 0
    assert len(events(tmp_path / "eager", "checkpoint_committed")) > 1
    assert train(config, *eager) == 0
    assert commits(tmp_path / "run") == [ManifestId(1, 30)]


@pytest.mark.parametrize(
    ("request_", "key"), [("read", "config.toml"), ("list", MANIFESTS), ("put", LEASE), ("replace", LEASE)]
)
def test_store_that_fails_while_a_job_starts_is_a_failure(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request_: str,
    key: str,
) -> None:
    store = away(tmp_path / "run", request_, key)
    monkeypatch.setattr("trainer.train.open_store", lambda uri, **options: store)
    assert train(config) == 1
    said = capsys.readouterr().err
    assert AWAY in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_busy_store_at_start_is_failure_a_missing_one_a_mistake(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.inject(Answer(503))
        assert train(config, "run.uri=s3://bucket/run") == 1
    assert "still answers 503" in capsys.readouterr().err
    assert train(config, "run.uri=s3://bucket/run") == 2
    assert "cannot reach" in capsys.readouterr().err


@pytest.mark.slow
def test_archived_checkpoint_is_a_persons_to_restore(
    config: Path, moto_s3: S3Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, f"run.uri={moto_s3.uri()}", "task.strike=2") == 85
    (attempt,) = {key for info in open_store(moto_s3.uri()).list(ATTEMPTS) if (key := info.key).endswith(".bin")}
    moto_s3.archive(f"run/{attempt}", "GLACIER")
    capsys.readouterr()
    assert train(config, f"run.uri={moto_s3.uri()}", process=2) == 2
    assert f"1 of 2 objects cannot be read before they are restored from an archive, such as {attempt} in GLACIER" in (
        capsys.readouterr().err
    )


def test_a_last_state_that_the_store_does_not_take_is_a_failure(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = away(tmp_path / "run", "put", ManifestId(1, 8).key)
    monkeypatch.setattr("trainer.train.open_store", lambda uri, **options: store)
    monkeypatch.setattr("trainer.run.saving.LONGEST_PAUSE_S", 0.01)
    assert train(config) == 1
    assert "step 8 could not be saved in 3 tries" in capsys.readouterr().err
    failed = events(tmp_path / "run", "checkpoint_failed")
    assert [event["step"] for event in failed] == [8, 8, 8]
    assert all(AWAY in event["detail"] for event in failed)


@pytest.mark.slow
def test_store_that_fails_while_weights_are_read_back_is_failure(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config) == 0
    store = away(tmp_path / "run", "read", ManifestId(1, 8).key)
    monkeypatch.setattr("trainer.train.open_store", lambda uri, **options: store)
    assert train(config, "train.steps=9") == 1
    assert AWAY in capsys.readouterr().err
    assert len(records(tmp_path / "run")) == 8


def test_deadline_whose_margin_has_begun_is_refused_at_the_start(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert train(config, f'interrupt.deadline="{tomorrow}"', "interrupt.deadline_margin_s=100000") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"interrupt.deadline = '{tomorrow}': the time to stop, ")
    assert not (tmp_path / "run" / LEASE).exists()
