"""The rehearsal's image stages: what they promise is broken where it does not hold, and without an engine a plan is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from rehearsal import images
from rehearsal.journey import CONFIG
from trainer.storage import open_store

WHY = "an engine of our own needs root; fix: run as root"
REFERENCE = [{"step": step, "loss": 7.0 - step / 10} for step in range(1, 5)]


def run(folder: Path) -> images.Run:
    return images.Run(CONFIG, {}, 2, {}, open_store(str(folder)), REFERENCE, 1e-4, 120.0)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "reachable", lambda: None)
    monkeypatch.setattr(images, "why_not", lambda: WHY)
    monkeypatch.delenv("LUSTRAIN_REQUIRE", raising=False)


def test_without_an_engine_the_plan_is_shown_with_the_reason(
    no_engine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with images.scenarios(tmp_path / "images", run(tmp_path)) as scenarios:
        (scenario,) = scenarios
        outcome, promises = scenario.run()
    assert outcome.startswith(WHY)
    assert promises == []
    said = capsys.readouterr().out
    assert "would build localhost/rehearsal/trainer:cpu-torch" in said
    assert "layer torch: from" in said
    assert "BASE_IMAGE = docker.io/library/debian@sha256:" in said


def test_where_everything_is_required_a_missing_engine_breaks_it(
    no_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUSTRAIN_REQUIRE", "all")
    with images.scenarios(tmp_path / "images", run(tmp_path)) as scenarios:
        _, (promise,) = scenarios[0].run()
    assert (promise.kept, promise.figure) == (False, WHY)


def test_with_the_users_engine_what_is_needed_besides_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "reachable", lambda: {"DOCKER_HOST": "tcp://127.0.0.1:1"})
    monkeypatch.setattr(images.shutil, "which", lambda name: None if name == "mmdebstrap" else f"/usr/bin/{name}")
    with images.scenarios(tmp_path / "images", run(tmp_path)) as (scenario,):
        outcome, _ = scenario.run()
    assert "there is no mmdebstrap" in outcome
