"""The rehearsal's image stages: what they promise is broken where it does not hold, and without an engine a plan is shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from rehearsal import images
from rehearsal.journey import CONFIG
from tests.lab.judged import judged
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
    with images.begun(tmp_path / "images") as image:
        (scenario,) = image.scenarios(run(tmp_path))
        outcome, promises = judged(scenario.run())
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
    with images.begun(tmp_path / "images") as image:
        _, (promise,) = judged(image.scenarios(run(tmp_path))[0].run())
    assert (promise.kept, promise.figure) == (False, WHY)


def test_with_the_users_engine_what_is_needed_besides_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "reachable", lambda: {"DOCKER_HOST": "tcp://127.0.0.1:1"})
    monkeypatch.setattr(images.shutil, "which", lambda name: None if name == "mmdebstrap" else f"/usr/bin/{name}")
    with images.begun(tmp_path / "images") as image:
        (scenario,) = image.scenarios(run(tmp_path))
        outcome, _ = judged(scenario.run())
    assert "there is no mmdebstrap" in outcome


def test_failed_build_fails_its_stage_and_not_the_ones_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*_: object) -> NoReturn:
        raise RuntimeError("dockerd did not start")

    monkeypatch.setattr(images, "_why_not", lambda own: None)
    monkeypatch.setattr(images, "_image_lab", no_engine)
    with images.begun(tmp_path / "images") as image:
        built, _ = image.scenarios(run(tmp_path))
        with pytest.raises(RuntimeError, match="dockerd did not start"):
            judged(built.run())


def test_journey_that_stops_takes_the_engine_from_a_build_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, gone = threading.Event(), threading.Event()

    @contextmanager
    def lab(*_: object) -> Iterator[None]:
        yield
        gone.set()

    def build(_: object) -> NoReturn:
        building.set()
        assert gone.wait(300)
        raise RuntimeError("no engine")

    monkeypatch.setattr(images, "_why_not", lambda own: None)
    monkeypatch.setattr(images, "_image_lab", lab)
    monkeypatch.setattr(images, "build", build)
    with suppress(KeyboardInterrupt), images.begun(tmp_path / "images"):
        assert building.wait(300)
        raise KeyboardInterrupt
    assert gone.is_set()


def test_journey_that_stops_while_the_engine_comes_up_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming, stopped = threading.Event(), threading.Event()
    gone, built = threading.Event(), threading.Event()

    @contextmanager
    def lab(*_: object) -> Iterator[None]:
        coming.set()
        assert stopped.wait(300)
        yield
        gone.set()

    def close(stack: ExitStack) -> None:
        stack.__exit__(None, None, None)
        stopped.set()

    monkeypatch.setattr(images, "_why_not", lambda own: None)
    monkeypatch.setattr(images, "_image_lab", lab)
    monkeypatch.setattr(images, "build", lambda _: built.set())
    monkeypatch.setattr(images.ExitStack, "close", close)
    with suppress(KeyboardInterrupt), images.begun(tmp_path / "images"):
        assert coming.wait(300)
        raise KeyboardInterrupt
    assert (gone.is_set(), built.is_set()) == (True, False)


@pytest.mark.parametrize(("stopped", "raised"), [(False, RuntimeError), (True, KeyboardInterrupt)])
def test_engine_that_cannot_be_removed_is_told_at_the_end(
    stopped: bool,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def lab(*_: object) -> Iterator[None]:
        yield
        raise RuntimeError("its folder is busy")

    def journey() -> None:
        with images.begun(tmp_path / "images") as image:
            judged(image.scenarios(run(tmp_path))[0].run())
            if stopped:
                raise KeyboardInterrupt
            image.done()

    monkeypatch.setattr(images, "_why_not", lambda own: None)
    monkeypatch.setattr(images, "_image_lab", lab)
    monkeypatch.setattr(images, "build", lambda _: ("built", []))
    with pytest.raises(raised):
        journey()
    assert ("its folder is busy" in capsys.readouterr().err) is stopped
