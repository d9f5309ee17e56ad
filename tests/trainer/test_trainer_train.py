"""Training as a user starts it: whole attempts in this process, and mistakes that end them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lustrain.problem import UserError
from tests.trainer.tiny_runs import commits, records, train, write_config
from tests.trainer.tiny_task import Tiny
from trainer.checkpoint.format.layout import ManifestId

STEPS = 12


@pytest.fixture
def config(tmp_path: Path) -> Path:
    more = "[eval]\nevery = 5\nbatches = 1\n[metrics]\nbatch_digest = true\n"
    return write_config(tmp_path, STEPS, 2, every_steps=4, more=more)


@pytest.mark.slow
def test_every_step_leaves_one_whole_record(config: Path, tmp_path: Path) -> None:
    assert train(config) == 0
    found = records(tmp_path / "run")
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    names = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "data_seconds"}
    names |= {"blocked_seconds", "world_size", "attempt", "batch_digest"}
    assert all(names <= record.keys() for record in found)
    assert found[-1]["tokens"] == STEPS * 4
    assert [record["step"] for record in found if "eval_loss" in record] == [5, 10]


@pytest.mark.slow
def test_damage_to_the_data_is_exit_2_with_the_last_step_saved(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def check(self: Tiny) -> None:
        asked.append(1)
        if len(asked) > 4:
            raise UserError("shard = 'train-00000.tok': has another checksum")

    monkeypatch.setattr(Tiny, "check", check)
    assert train(config) == 2
    said = capsys.readouterr()
    assert "damaged data: saving after this step" in said.out
    assert said.err.strip().splitlines()[-1] == "shard = 'train-00000.tok': has another checksum"
    assert commits(tmp_path / "run") == [ManifestId(1, 4), ManifestId(1, 5)]


@pytest.mark.slow
def test_without_a_loss_that_is_a_number_nothing_is_saved(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "optimizer.lr=1e38", "train.grad_clip=0.0", "checkpoint.every_steps=1") == 1
    message = capsys.readouterr().err
    assert "not finite" in message
    assert "Traceback" not in message
    last = records(tmp_path / "run")[-1]["step"]
    assert all(commit.step <= last for commit in commits(tmp_path / "run"))


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (["train.global_batch=9"], "train.global_batch = 9: is not a multiple of micro_batch = 2; allowed: multiples of 2"),
        (["train.micro_batch=16"], "train.global_batch = 4"),
        (["task.name=poetry"], "task.name = 'poetry'"),
        (["task.sample=3"], "task.sample = 3: unknown key"),
        (["task.samples=0", "eval.every=0"], "the training set has no whole sample"),
        (["schedule.warmup_steps=99"], "schedule.warmup_steps = 99"),
        (["parallel.comm_hook=powersgd"], "parallel.comm_hook = 'powersgd': was removed"),
        (["checkpoint.compression=planes-zstd"], "checkpoint.compression = 'planes-zstd': was removed"),
        (["parallel.device=cuda"], "parallel.device = 'cuda'"),
        (["interrupt.deadline=tomorrow"], "interrupt.deadline = 'tomorrow': is not a time; allowed: a time with its zone"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_exit_2_and_nothing_written(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: list[str], line: str
) -> None:
    assert train(config, *sets) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert line in message
    assert not list((tmp_path / "run").rglob("*.json"))
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.slow
def test_another_models_run_or_one_that_must_be_new_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, "run.resume=false") == 0
    lease = (tmp_path / "run" / "lease.json").read_bytes()
    capsys.readouterr()
    assert train(config, "task.samples=65", "train.global_batch=8") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert {line.split(" = ")[0] for line in lines} >= {"[task] data.samples", "train.global_batch"}
    assert train(config, "run.resume=false") == 2
    assert "already holds" in capsys.readouterr().err
    assert (tmp_path / "run" / "lease.json").read_bytes() == lease
