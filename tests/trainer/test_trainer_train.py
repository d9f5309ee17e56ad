"""Training as a user starts it: whole attempts in this process, with a stop file where an interruption is needed."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from tests.processes import wait_until
from trainer.__main__ import main
from trainer.metrics.reader import read_events, read_steps
from trainer.storage import open_store
from trainer.tasks import Batch, Ids
from trainer.tasks.language_model import LanguageModel

STEPS = 12
LONG = ("train.steps=120", "train.micro_batch=1", "eval.every=0", "checkpoint.every_steps=20")
"""Long enough for a save before the end."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level token set of this test's own directory's sources."""
    out = tmp_path_factory.mktemp("tokens") / "set"
    sources = [str(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    assert main(["tokenize", *sources, "--out", str(out), "--tokenizer", "bytes", "--val-fraction", "0.2"]) == 0
    return out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUSTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path: Path, tokens: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(
        f"""
[run]
uri = "{tmp_path}/run"
[task]
name = "language_model"
data = "{tokens}"
seq_len = 16
[task.model]
width = 32
layers = 1
heads = 2
kv_heads = 1
hidden = 64
dropout = 0.1
[train]
steps = {STEPS}
global_batch = 8
micro_batch = 2
deterministic = true
[optimizer]
lr = 1e-2
[eval]
every = 5
batches = 1
[checkpoint]
every_steps = 4
[interrupt]
stop_uri = "{tmp_path}/stop"
poll_s = 0.005
[metrics]
batch_digest = true
"""
    )
    return path


def train(config: Path, *sets: str) -> int:
    return main(["train", str(config), *[word for pair in sets for word in ("--set", pair)]])


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return read_steps(open_store(str(folder)))


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(open_store(str(folder))) if event["event"] == kind]


def stop_after_first_save(folder: Path) -> None:
    wait_until(lambda: list((folder / "run").glob("attempts/*")))
    (folder / "stop").touch()
    wait_until(lambda: events_of(folder / "run", "notice"))
    (folder / "go").touch()


def bits(records: list[dict[str, Any]]) -> list[bytes]:
    return [struct.pack("<qddd", r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records]


@pytest.mark.slow
def test_every_step_leaves_one_whole_record(config: Path, tmp_path: Path) -> None:
    assert train(config) == 0
    records = steps_of(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    names = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "data_seconds"}
    names |= {"blocked_seconds", "world_size", "attempt"}
    assert all(names <= record.keys() for record in records)
    assert records[-1]["tokens"] == STEPS * 8 * 16
    assert records[-1]["loss"] < records[0]["loss"]
    assert [record["step"] for record in records if "eval_loss" in record] == [5, 10]


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit_and_exits_85_and_0(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_batch = LanguageModel.train_batch

    def held(task: LanguageModel, ids: Ids) -> Batch:
        """Once there is a save, training waits until its notice is there."""
        if list((tmp_path / "run").glob("attempts/*")):
            wait_until((tmp_path / "go").exists)
        return train_batch(task, ids)

    assert train(config, f"run.uri={tmp_path}/reference", *LONG) == 0
    stop_once_saved = threading.Thread(target=stop_after_first_save, args=(tmp_path,))
    stop_once_saved.start()
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "train_batch", held)
        assert train(config, *LONG) == 85
    stop_once_saved.join()
    stopped_at = steps_of(tmp_path / "run")[-1]["step"]
    assert 1 <= stopped_at < 120
    assert events_of(tmp_path / "run", "stopped")[-1]["exit_code"] == 85
    assert train(config, *LONG) == 2
    (tmp_path / "stop").unlink()
    assert train(config, *LONG) == 0
    assert bits(steps_of(tmp_path / "run")) == bits(steps_of(tmp_path / "reference"))
    assert events_of(tmp_path / "run", "resumed")[0]["step"] == stopped_at


@pytest.mark.slow
def test_damage_to_the_data_found_while_training_is_exit_2_with_the_last_step_saved(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def check(self: LanguageModel) -> None:
        asked.append(1)
        if len(asked) > 4:
            raise UserError("shard = 'train-00000.tok': has another checksum")

    monkeypatch.setattr(LanguageModel, "check", check)
    assert train(config) == 2
    said = capsys.readouterr()
    assert "damaged data: saving after this step" in said.out
    assert said.err.strip().splitlines()[-1] == "shard = 'train-00000.tok': has another checksum"
    monkeypatch.undo()
    assert main(["checkpoints", "list", f"{tmp_path}/run", "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [5, 4]


@pytest.mark.slow
def test_a_finished_run_started_again_changes_nothing_and_exits_0(config: Path, tmp_path: Path) -> None:
    assert train(config) == 0
    before = steps_of(tmp_path / "run")
    assert train(config) == 0
    assert steps_of(tmp_path / "run") == before


@pytest.mark.slow
def test_more_steps_prolong_a_run_and_the_change_is_recorded(config: Path, tmp_path: Path) -> None:
    assert train(config) == 0
    assert train(config, f"train.steps={STEPS + 3}") == 0
    assert steps_of(tmp_path / "run")[-1]["step"] == STEPS + 3
    assert events_of(tmp_path / "run", "config_changed")[-1]["changes"] == {"train.steps": [STEPS, STEPS + 3]}


@pytest.mark.slow
def test_early_stopping_ends_a_run_whose_evaluation_gains_too_little(config: Path, tmp_path: Path) -> None:
    rules = ("eval.every=2", "eval.patience=2", "eval.min_delta=100.0")
    assert train(config, *rules) == 0
    # The first evaluation is always a gain; the next two gain less than 100 nats.
    assert steps_of(tmp_path / "run")[-1]["step"] == 6
    assert "stopped improving" in events_of(tmp_path / "run", "stopped")[-1]["detail"]


@pytest.mark.slow
def test_without_a_loss_that_is_a_number_nothing_is_saved(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "optimizer.lr=1e30", "train.grad_clip=0.0") == 1
    message = capsys.readouterr().err
    assert "not finite" in message
    assert "Traceback" not in message
    saved = [info.key for info in open_store(f"{tmp_path}/run").list("manifests/")]
    last = steps_of(tmp_path / "run")[-1]["step"]
    assert all(int(key.split("-")[1].removesuffix(".json")) <= last for key in saved)


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["task.model.heads=3"], "heads"),
        (["train.global_batch=9"], "train.global_batch = 9: is not a multiple of world size x micro_batch = 1 x 2"),
        (["train.micro_batch=16"], "train.global_batch = 8"),
        (["task.data=/nowhere/at/all"], "'/nowhere/at/all'"),
        (["task.name=poetry"], "task.name = 'poetry'"),
        (["task.seqlen=3"], "task.seqlen = 3: unknown key"),
        (["schedule.warmup_steps=99"], "schedule.warmup_steps = 99"),
        (["parallel.comm_hook=powersgd"], "parallel.comm_hook = 'powersgd': was removed"),
        (["checkpoint.compression=planes-zstd"], "checkpoint.compression = 'planes-zstd': was removed"),
        (["parallel.device=cuda"], "parallel.device = 'cuda'"),
        (
            ["interrupt.deadline=tomorrow"],
            "interrupt.deadline = 'tomorrow': is not a time; allowed: a time with its zone",
        ),
        (["task.model.vocab_size=10"], "vocab_size"),
    ],
)
def test_a_mistake_is_one_line_exit_2_and_nothing_written(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: list[str], line: str
) -> None:
    assert train(config, *sets) == 2
    message = capsys.readouterr().err.strip()
    assert line in message
    assert "\n" not in message
    assert not list((tmp_path / "run").rglob("*.json"))
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.slow
def test_another_models_run_is_refused_by_name_and_left_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config) == 0
    lease = (tmp_path / "run" / "lease.json").read_bytes()
    capsys.readouterr()
    assert train(config, "task.model.layers=2", "train.global_batch=16") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert {line.split(" = ")[0] for line in lines} == {"task.model.layers", "train.global_batch"}
    assert (tmp_path / "run" / "lease.json").read_bytes() == lease


def test_a_run_that_must_be_new_is_refused_where_there_is_one(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config) == 0
    capsys.readouterr()
    assert train(config, "run.resume=false") == 2
    assert "already holds" in capsys.readouterr().err


@pytest.mark.slow
def test_damage_to_the_newest_checkpoint_costs_one_interval_and_is_said(config: Path, tmp_path: Path) -> None:
    assert train(config, f"run.uri={tmp_path}/reference") == 0
    assert train(config, "train.steps=8", f"schedule.total_steps={STEPS}") == 0
    newest = sorted((tmp_path / "run" / "manifests").iterdir())[-1]
    part = json.loads(newest.read_text())["parts"][0]["data_key"]
    with (tmp_path / "run" / part).open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    assert train(config) == 0
    assert events_of(tmp_path / "run", "resumed")[-1]["step"] == 4
    assert [event["step"] for event in events_of(tmp_path / "run", "checkpoint_skipped")] == [8]
    assert bits(steps_of(tmp_path / "run")) == bits(steps_of(tmp_path / "reference"))
