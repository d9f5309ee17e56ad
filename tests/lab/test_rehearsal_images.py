"""The rehearsal's image stages: what they promise is broken where it does not hold, and without an engine a plan is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rehearsal import images, proof
from rehearsal.journey import CONFIG
from trainer.storage import open_store

WHY = "an engine of our own needs root; fix: run as root"
CLAIM = "the same losses"
REFERENCE = [{"step": step, "loss": 7.0 - step / 10} for step in range(1, 5)]


def run(folder: Path) -> images.Run:
    return images.Run(CONFIG, {}, 2, {}, open_store(str(folder)), REFERENCE, 1e-4, 120.0)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "reachable", lambda: None)
    monkeypatch.setattr(images, "why_not", lambda: WHY)
    monkeypatch.delenv("LUSTRAIN_REQUIRE", raising=False)


def compared(seen: list[dict[str, Any]]) -> tuple[bool, str]:
    promise = proof.close_losses(CLAIM, REFERENCE[: len(seen)], seen, 1e-4)
    return promise.kept, promise.figure


def test_losses_that_are_the_same_or_nearly_so_keep_the_promise() -> None:
    assert compared(REFERENCE[:2]) == (True, "2 of 2 steps bit-identical, largest relative difference 0.0e+00")
    near = [{"step": 1, "loss": REFERENCE[0]["loss"] * (1 + 5e-5)}]
    assert compared(near)[0]
    assert compared(near)[1].startswith("0 of 1 steps bit-identical")


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [{"step": 1, "loss": REFERENCE[0]["loss"] * (1 + 2e-4)}],
        [REFERENCE[0], {"step": 9, "loss": 6.0}],
        [{"step": 1, "loss": float("nan")}],
    ],
    ids=["none", "too far", "a step that the reference has not", "no number"],
)
def test_other_losses_break_it(seen: list[dict[str, Any]]) -> None:
    assert not compared(seen)[0]


def test_without_an_engine_the_plan_is_shown_with_the_reason(
    no_engine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with images.scenes(tmp_path / "images", run(tmp_path)) as scenes:
        (scene,) = scenes
        outcome, promises = scene.play()
    assert outcome.startswith(WHY)
    assert promises == []
    said = capsys.readouterr().out
    assert "would build localhost/rehearsal/trainer:cpu-torch" in said
    assert "layer torch: from" in said
    assert "BASE_IMAGE = docker.io/library/debian@sha256:" in said


def test_where_everything_is_required_a_missing_engine_breaks_a_promise(
    no_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUSTRAIN_REQUIRE", "all")
    with images.scenes(tmp_path / "images", run(tmp_path)) as scenes:
        _, (promise,) = scenes[0].play()
    assert (promise.kept, promise.figure) == (False, WHY)


def test_an_engine_elsewhere_is_not_built_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "reachable", lambda: {"DOCKER_HOST": "tcp://127.0.0.1:1"})
    monkeypatch.setattr(images.shutil, "which", lambda name: None if name == "mmdebstrap" else f"/usr/bin/{name}")
    assert "there is no mmdebstrap" in str(images._why_not(own=False))
