"""What decides whether a promise of the rehearsal held: one step that is other, missing, not a number or too many breaks it."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lustrain.problem import UserError
from rehearsal import journey as journeys
from rehearsal import nodes, tasks
from rehearsal.proof import (
    Promise,
    StepTimes,
    alert_came_and_went,
    close_losses,
    lost_at_most,
    pace,
    planned_goodput,
    same_batches,
    same_losses,
    same_weights_at_load,
)
from rehearsal.watch import Watch
from trainer.metrics.alerts import Firing

Rows = list[dict[str, Any]]


def rows(steps: int = 4) -> Rows:
    return [{"step": step, "loss": 5.0 - step, "grad_norm": 1.0, "batch_digest": step} for step in range(1, steps + 1)]


def close(reference: Rows, other: Rows) -> Promise:
    return close_losses("close", reference, other, 1e-4)


def batches(reference: Rows, other: Rows) -> Promise:
    return same_batches(reference, other, "batches")


CHECKS: dict[Callable[[Rows, Rows], Promise], str] = {same_losses: "loss", close: "loss", batches: "batch_digest"}


@pytest.mark.parametrize("check", CHECKS)
def test_equal_histories_keep_a_promise_and_others_break_it(check: Callable[[Rows, Rows], Promise]) -> None:
    assert check(rows(), rows()).kept
    assert not check([], []).kept
    assert not check(rows(), rows(3)).kept
    assert not check(rows(), rows(5)).kept
    for at in range(4):
        for value in (9, float("nan")):
            other = rows()
            other[at][CHECKS[check]] = value
            assert not check(rows(), other).kept, (at, value)
            assert not check(other, rows()).kept, (at, value)


def test_difference_within_the_tolerance_is_close() -> None:
    assert close(rows(), rows()).figure == "4 of 4 steps bit-identical, largest relative difference 0.0e+00"
    for factor, kept in ((1 + 0.9e-4, True), (1 + 1.1e-4, False), (1 - 1.1e-4, False)):
        other = rows()
        other[2]["loss"] *= factor
        assert close(rows(), other).kept is kept
        assert not same_losses(rows(), other).kept


def test_a_kill_costs_two_intervals_at_most() -> None:
    assert [lost_at_most(16, 100, at).kept for at in (101, 100, 68, 67)] == [False, True, True, False]


def resumed(step: int = 8, weights: str = "ab", world: int = 2) -> Sequence[dict[str, Any]]:
    return [{"event": "resumed", "step": step, "weights_crc64nvme": weights, "world_size": world}]


def test_two_worlds_must_begin_from_the_same_weights() -> None:
    assert same_weights_at_load(resumed(), resumed(world=1)).kept
    for other in (resumed(), resumed(step=9, world=1), resumed(weights="cd", world=1), []):
        assert not same_weights_at_load(resumed(), other).kept
    assert same_weights_at_load([*resumed(), *resumed(step=16, weights="ef")], resumed(world=1)).kept


def test_alert_must_come_and_go() -> None:
    for fired, went in ((True, True), (True, False), (False, False)):
        assert alert_came_and_went("RunDown", [], 100.0, fired=fired, went=went).kept is (fired and went)
    firings = [Firing("RunDown", 10, 20), Firing("DiskFull", 101, 102), Firing("RunDown", 105, 115)]
    assert "5 s after" in alert_came_and_went("RunDown", firings, 100.0, fired=True, went=True).figure


def test_prometheus_that_saw_too_little_decides_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\nlast\n")

    def blind(seen: bool, fired: bool, done: bool, command: str = "cat") -> bool:
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            if command == "false":
                process.wait()
            watch = Watch("http://127.0.0.1:1", "run", 1, process, tmp_path / "log", seen, fired, done)
            return watch.why_blind() is not None

    assert not blind(True, True, True)
    assert not blind(True, False, False)
    assert blind(False, False, False)
    assert blind(True, True, False)
    assert blind(True, True, True, "false")


def test_goodput_is_planned_from_an_undisturbed_run() -> None:
    steps = [
        {"time": f"1970-01-01T00:00:{9 + step:02d}+00:00", "step_seconds": 1.0, "blocked_seconds": 0.5 * (step == 2)}
        for step in range(1, 5)
    ]
    found = pace(steps, [{"event": "checkpoint_committed", "seconds": 0.25}, {"event": "stopped"}], started=4.0)
    assert found == StepTimes(start_s=5.0, step_s=1.0, stall_s=0.5, commit_s=0.25)
    calm = planned_goodput(found, 100, 10, 1e9)
    assert calm == pytest.approx(100 / (100 + 100 / 10 * 0.5 + 5), abs=1e-6)
    assert 0 < planned_goodput(found, 100, 10, 60.0) < calm


@pytest.mark.parametrize(("kept", "code"), [(True, 0), (False, 1)])
def test_a_broken_promise_is_exit_code_1(
    kept: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_journey(steps: int, seed: int, picture: Any, slurm: bool) -> journeys.Journey:
        journey = object.__new__(journeys.Journey)
        journey.stages, journey.promises = [], [Promise("one", True, ""), Promise("two", kept, "")]
        return journey

    monkeypatch.setattr(journeys, "run_journey", run_journey)
    monkeypatch.setattr(journeys, "as_dict", lambda journey: {})
    monkeypatch.setattr(tasks, "FOLDER", tmp_path)
    answer = tasks.rehearse.body.__wrapped__(tasks.RehearseFlags())
    assert (answer.code, bool(answer.lines)) == (code, not kept)
    assert ("BROKEN" in (tmp_path / "report.md").read_text()) is not kept
    assert ("BROKEN" in capsys.readouterr().out) is not kept


@pytest.mark.parametrize(
    ("error", "why", "code", "traced"),
    [
        (KeyboardInterrupt(), "stopped by Ctrl-C", 1, False),
        (UserError("one line", 3), "one line", 3, False),
        (RuntimeError("node2 ended\nwith a long log"), "node2 ended", 1, True),
    ],
)
def test_rehearsal_that_ends_early_tells_what_it_judged(
    error: BaseException,
    why: str,
    code: int,
    traced: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def bring_up(journey: journeys.Journey) -> None:
        with journey.stage("first", real="", emulated="") as stage:
            stage["outcome"] = "done"
            journey.promise("one", True, "figure")
        with journey.stage("second", real="", emulated=""):
            raise error

    for place in ("LocalAws", "LocalMetadata"):
        monkeypatch.setattr(journeys, place, lambda: nullcontext(SimpleNamespace(environment={})))
    for room in (journeys.nodes, journeys.images):
        monkeypatch.setattr(room, "begun", nullcontext)
    monkeypatch.setattr(journeys, "bring_up", bring_up)
    monkeypatch.setattr(tasks, "FOLDER", tmp_path)
    answer = tasks.rehearse.body.__wrapped__(tasks.RehearseFlags(json=True))
    assert (answer.code, answer.problems) == (code, [f"stage 2, second: {why}"])
    assert [promise["claim"] for promise in answer.data["promises"]] == ["one"]
    assert [stage["name"] for stage in answer.data["stages"]] == ["first"]
    assert answer.data["kept"] is False
    said = capsys.readouterr()
    assert "figure" in said.out
    assert ("Traceback" in said.err) is traced
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize(
    ("broken", "told", "stages", "at"),
    [
        ("scenario", ["one", "two"], ["first"], "second"),
        ("lab", ["one", "two", "three"], ["first", "second", "third"], "nodes made of namespaces"),
    ],
)
def test_nodes_that_fail_midway_keep_what_was_judged(
    broken: str, told: list[str], stages: list[str], at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def scenario(name: str, promise: str, *, fails: bool = False) -> nodes.Scenario:
        def judge() -> nodes.Judging:
            yield Promise(promise, True, "")
            if fails:
                raise RuntimeError("no answer")
            return "done"

        return nodes.Scenario(name, "", "", judge)

    @contextmanager
    def scenarios(folder: Path) -> Iterator[list[nodes.Scenario]]:
        yield [
            scenario("first", "one"),
            scenario("second", "two", fails=broken == "scenario"),
            scenario("third", "three"),
        ]
        if broken == "lab":
            raise RuntimeError("a mount is busy")

    monkeypatch.setattr(nodes, "scenarios", scenarios)
    parts: Any = (None, None)
    journey = journeys.Journey(48, random.Random(0), tmp_path, {}, *parts)
    with nodes.begun(tmp_path) as tuned, pytest.raises(RuntimeError):
        journeys.set_up_nodes(journey, tuned)
    assert [promise.text for promise in journey.promises] == told
    assert [stage.name for stage in journey.stages] == stages
    assert journey.at == at
