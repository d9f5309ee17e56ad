"""A run that an earlier version stored goes on; `stored_run/README.md` says which version that was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.tiny_runs import events, records, train

STORED = Path(__file__).parent / "stored_run"
LOSSES = {4: 5.287157297134399, 5: 5.2340521812438965, 6: 5.187442779541016}
"""Of the steps that the storing version took next; other kernels round differently."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def resume(run: Path, *sets: str) -> int:
    folder = run.parent
    return train(folder / "config.toml", f"run.uri={run}", f"task.data={folder}/tokens", "train.steps=6", *sets)


@pytest.mark.slow
def test_run_of_an_earlier_version_goes_on_as_that_version_did(run: Path) -> None:
    assert resume(run) == 0
    assert [event["step"] for event in events(run, "resumed")] == [3]
    (changed,) = events(run, "config_changed")
    assert changed["changes"].keys() == {"run.uri", "task.data", "train.steps"}
    assert {r["step"]: r["loss"] for r in records(run) if r["step"] > 3} == pytest.approx(LOSSES, rel=1e-4)


@pytest.mark.slow
def test_lower_rate_is_taken_by_a_run_of_an_earlier_version(run: Path) -> None:
    assert resume(run, "optimizer.lr=0.005", "optimizer.fused=false") == 0
    before, *after = [record["lr"] for record in records(run)][2:]
    assert [rate * 2 for rate in after] == pytest.approx([0.0055, 0.00325, 0.0016028856829700257])
    assert before == pytest.approx(0.00775)
    changes = events(run, "config_changed")[0]["changes"]
    assert (changes["optimizer.lr"], changes["optimizer.fused"]) == ([0.01, 0.005], [None, False])


def test_other_seed_is_refused_by_a_run_of_an_earlier_version(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lease = (run / "lease.json").read_bytes()
    assert resume(run, "run.seed=6", "task.model.layers=2") == 2
    named = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert named == ["task.model.layers = 2", "run.seed = 6"]
    assert (run / "lease.json").read_bytes() == lease
