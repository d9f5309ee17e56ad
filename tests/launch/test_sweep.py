"""`fab sweep`: a grid makes runs with stable names, each is started once, and a wrong grid starts none."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
from invoke.context import Context
from invoke.exceptions import Exit

from launch import backends, tasks
from launch.backends import HeldJob, LaunchPlan, Submission
from launch.backends.kubernetes import JOB_NAME
from launch.flags import SweepFlags
from launch.request import RunRequest
from launch.runs import read_record, register_run
from launch.sweep import status
from launch.sweep.grid import point_name, split_values
from launch.sweep.plan import SearchPlan, SweepPlan, plan_search, plan_sweep
from launch.sweep.record import RECORD, load_sweep, register_sweep
from launch.sweep.search import Trial, draw_values, parse_space
from launch.sweep.start import StartOptions, SweepStart, start_search, start_sweep
from lustrain.problem import FAILED, USAGE, UserError, problem
from tests.lab.training import config as settings
from tests.launch.test_backends import PrinterBackend
from tests.launch.test_request import cluster
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from trainer.metrics.records import STEPS, PartName, encode
from trainer.run import journal
from trainer.storage import ObjectStore, open_store
from trainer.storage.local import LocalStore

RATES = ("optimizer.lr=0.01,0.02,0.03",)


class QueueBackend(PrinterBackend):
    """Takes runs as jobs that stay until a test ends them; refuses those of `refused` by their number in the sweep."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.queued: set[str] = set()
        self.refused: set[int] = set()

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        if resume and request.run in self.queued:
            raise UserError(problem("--resume", request.run, "its job still runs"))

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        if len(self.taken) in self.refused:
            raise UserError("out of paper; fix: add some", USAGE)
        self.taken.append(request.run)
        self.queued.add(request.run)
        return Submission(("printed",), {}, job={"page": len(self.taken)})

    def end(self, run: str, code: int) -> None:
        self.queued.remove(run)
        record_end(run, code)


class ArrayQueueBackend(QueueBackend):
    """Takes the runs of a sweep as one job, too."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[dict[int, str]] = []

    def check_queue(self, request: RunRequest, *, resume: bool) -> None:
        self.check(request, LaunchPlan(()), Path("/"), resume=resume)

    def plan_array(
        self,
        requests: Mapping[int, RunRequest],
        sweep: str,
        folder: Path,
        environ: Mapping[str, str],
        at_once: int | None,
    ) -> LaunchPlan | None:
        return LaunchPlan((), {"pages": f"{at_once}"})

    def check_array(self, request: RunRequest, plan: LaunchPlan, folder: Path) -> None:
        """It takes everything."""

    def held_jobs(self, sweep: str, runs: Sequence[str]) -> dict[str, HeldJob]:
        return {run: HeldJob("7", "paper jam", "pull") for run in sorted(self.queued)}

    def submit_array(
        self, requests: Mapping[int, RunRequest], plan: LaunchPlan, sweep: str, folder: Path
    ) -> list[Submission]:
        self.arrays.append({index: request.run for index, request in requests.items()})
        self.queued.update(self.arrays[-1].values())
        return [Submission(("printed",), {}, job={"page": index}) for index in requests]


class TurnBackend(PrinterBackend):
    """Trains runs while it is called; each ends with the next of `codes`, and has a validation loss by its learning rate."""

    supervised_by_caller = True
    supervises_ranges = False

    def __init__(self, codes: list[int]) -> None:
        self.codes, self.taken = codes, list[str]()

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        # As an executor's, which outlives it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.taken.append(request.run)
        code = self.codes.pop(0)
        rate = float(re.findall(r"^lr = (.*)$", request.config, re.MULTILINE)[0])
        record_steps(open_store(request.run), [abs(math.log(rate / 0.003))])
        record_end(request.run, code)
        return Submission((), {}, code=code)


def record_end(run: str, code: int) -> None:
    """Write the launches of a run whose last one ended with this code; a failure counts after three in a row."""
    store = open_store(run)
    for _ in range(3 if code == EXIT_FAILURE else 1):
        journal.finish(store, journal.begin(store, ["node1"], "test"), code)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> QueueBackend:
    backend = QueueBackend()
    monkeypatch.setitem(backends.MODULES, "printer", "tests.launch.test_backends")
    monkeypatch.setattr("tests.launch.test_backends.BACKEND", backend)
    return backend


def planned(tmp_path: Path, on: str = "printer", train: Mapping[str, object] | None = None, **flags: Any) -> SweepPlan:
    file = tmp_path / "config.toml"
    file.write_text(settings("runs/rates", **(train or {})))
    given = SweepFlags(str(file), on=on, nproc="1", **{"grid": RATES, **flags})
    return plan_sweep(given, None, backends.load_all(), tmp_path)


def begin(plan: SweepPlan, backend: PrinterBackend, at_once: int | None = None, resume: bool = False) -> SweepStart:
    return start_sweep(plan, StartOptions(backend, Path("/"), resume, at_once, None, lambda line: None))


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"grid": ()}, "--grid"),
        ({"grid": ("optimizer.lr",)}, "--grid"),
        ({"grid": ("optimizer.lr=0.1,,0.2",)}, "--grid"),
        ({"grid": ("lr=0.1",)}, "--grid"),
        ({"grid": ("run.uri=a,b",)}, "--grid"),
        ({"grid": (*RATES, "optimizer.lr=1")}, "--grid"),
        ({"set": ("optimizer.lr=1",)}, "--grid"),
        ({"grid": ("optimizer.lr=0.01,1e-2",)}, "--grid"),
        ({"max_points": "2"}, "--grid"),
        ({"max_points": "0"}, "--max-points"),
        ({"space": ("optimizer.lr=1..2",)}, "--space"),
        ({"trials": "3"}, "--trials"),
        ({"grid": ("optimizer.lrr=1,2",)}, "optimizer.lrr"),
        ({"grid": ("optimizer.lr=0.01,fast",)}, "optimizer.lr"),
        ({"grid": ("train.micro_batch=2,3",)}, "train.global_batch"),
        ({"nodes": "none"}, "--nodes"),
        ({"on": "slurm", "time": "long"}, "--time"),
    ],
)
def test_wrong_grid_is_one_line(tmp_path: Path, queue: QueueBackend, flags: dict[str, Any], path: str) -> None:
    with pytest.raises(UserError) as error:
        planned(tmp_path, **flags)
    assert [line.path for line in error.value.problems] == [path]
    assert not (tmp_path / "runs").exists()


def test_unknown_setting_names_the_nearest_one(tmp_path: Path, queue: QueueBackend) -> None:
    with pytest.raises(UserError) as error:
        planned(tmp_path, grid=("optimizer.lrr=1,2",))
    assert error.value.problems[0].fix == "did you mean lr?"


def test_grid_is_a_product_and_values_reach_the_runs(tmp_path: Path, queue: QueueBackend) -> None:
    plan = planned(tmp_path, grid=("run.seed=1,2", "schedule.kind=cosine, constant"))
    assert [tuple(point.values.values()) for point in plan.points] == [
        ("1", "cosine"), ("1", "constant"), ("2", "cosine"), ("2", "constant")
    ]  # fmt: skip
    last = plan.requests[-1]
    assert last.run == f"{tmp_path}/runs/rates/{plan.points[-1].name}"
    assert {"seed = 2", 'kind = "constant"'} <= set(last.config.splitlines())


def test_cluster_and_name_place_the_sweep(tmp_path: Path, queue: QueueBackend) -> None:
    (tmp_path / "config.toml").write_text(settings("runs/rates", global_batch=64))
    flags = SweepFlags(str(tmp_path / "config.toml"), name="second", grid=RATES)
    plan = plan_sweep(flags, cluster(), backends.load_all(), tmp_path)
    assert plan.uri == "s3://team-checkpoints/runs/second"
    assert {request.run.rpartition("/")[0] for request in plan.requests} == {plan.uri}


@pytest.mark.parametrize("key", ["optimizer.lr", "a._", "a." + "long_" * 9])
def test_names_suit_every_backend_and_differ(key: str) -> None:
    awkward = ["", "é", "-", "0.01", "0-01", "X" * 99, "X" * 98 + "Y", "[0.9, 0.95]", "a/../b", "x" * 37 + "/y"]
    names = [point_name(sweep, {key: value, "run.seed": "1"}) for sweep in ("rates", "other") for value in awkward]
    assert all(re.fullmatch(JOB_NAME, name) for name in names)
    assert len(set(names)) == 2 * len(awkward)


def test_name_says_the_values() -> None:
    assert point_name("rates", {"optimizer.lr": "0.01", "run.seed": "2"}).startswith("lr-0-01-seed-2-")
    assert point_name("rates", {"a.every": "1", "b.every": "2"}).startswith("a-every-1-b-every-2-")


def test_values_split_outside_brackets_and_quotes() -> None:
    assert split_values("1, 2") == ["1", "2"]
    assert split_values('[1,2],"a,b",{x=1,y=2}') == ["[1,2]", '"a,b"', "{x=1,y=2}"]


def test_points_keep_their_index_in_every_array_of_a_sweep(tmp_path: Path, queue: QueueBackend) -> None:
    plan, backend = planned(tmp_path), ArrayQueueBackend()
    uris = [request.run for request in plan.requests]
    assert begin(plan, backend).started == uris
    assert begin(plan, backend, resume=True).started == []
    backend.end(uris[1], EXIT_DONE)
    backend.queued.clear()
    assert begin(plan, backend, resume=True).started == [uris[0], uris[2]]
    assert backend.arrays == [dict(enumerate(uris)), {0: uris[0], 2: uris[2]}]


def test_at_once_bounds_the_unfinished_and_done_points_stay(tmp_path: Path, queue: QueueBackend) -> None:
    plan = planned(tmp_path)
    first, second, third = (request.run for request in plan.requests)
    result = begin(plan, queue, at_once=2)
    assert (queue.taken, result.waiting, result.ended_early) == ([first, second], 1, [])
    assert begin(planned(tmp_path), queue, at_once=2).waiting == 1
    queue.end(first, EXIT_DONE)
    queue.end(second, EXIT_FAILURE)
    result = begin(plan, queue, at_once=1)
    assert (queue.taken, result.waiting, result.ended_early) == ([first, second, third], 0, [second])
    result = begin(plan, queue, at_once=1, resume=True)
    assert (result.started, result.waiting) == ([], 1), "the third still has its job"
    assert begin(plan, queue, resume=True).started == [second]


def test_resume_starts_a_point_that_lost_its_job(tmp_path: Path, queue: QueueBackend) -> None:
    plan = planned(tmp_path)
    begin(plan, queue)
    queue.queued.discard(plan.requests[1].run)
    assert begin(plan, queue).started == []
    assert begin(plan, queue, resume=True).started == [plan.requests[1].run]


def test_refused_first_point_leaves_no_record(tmp_path: Path, queue: QueueBackend) -> None:
    queue.refused = {0}
    with pytest.raises(UserError):
        begin(planned(tmp_path), queue)
    assert not [path for path in (tmp_path / "runs").rglob("*.json") if path.is_file()]


def test_refused_later_point_keeps_the_earlier_ones(tmp_path: Path, queue: QueueBackend) -> None:
    queue.refused = {1}
    plan = planned(tmp_path)
    result = begin(plan, queue)
    assert result.error is not None
    assert (result.error.exit_code, result.started) == (USAGE, [plan.requests[0].run])
    queue.refused = set()
    assert begin(plan, queue).started == [request.run for request in plan.requests[1:]]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"grid": ("optimizer.lr=0.01,0.02",)}, "--grid"),
        ({"train": {"steps": 7}}, "run.uri"),
        ({"set": ("train.steps=7",)}, "run.uri"),
    ],
)
def test_folder_of_another_sweep_is_refused(
    tmp_path: Path, queue: QueueBackend, change: dict[str, Any], path: str
) -> None:
    begin(planned(tmp_path), queue, at_once=1)
    with pytest.raises(UserError) as error:
        begin(planned(tmp_path, **change), queue)
    assert ([line.path for line in error.value.problems], len(queue.taken)) == ([path], 1)
    assert len(load_sweep(open_store(f"{tmp_path}/runs/rates")).points) == 3


def test_folder_of_a_run_is_refused(tmp_path: Path, queue: QueueBackend) -> None:
    plan = planned(tmp_path)
    register_run(dataclasses.replace(plan.requests[0], run=plan.uri), resume=False, files={})
    with pytest.raises(UserError) as error:
        begin(plan, queue)
    assert error.value.problems[0].path == "run.uri"
    assert not Path(plan.uri, RECORD).exists()


def test_failed_point_does_not_end_a_sweep_in_turn(tmp_path: Path) -> None:
    plan, backend = planned(tmp_path, on="local"), TurnBackend([EXIT_DONE, EXIT_FAILURE, EXIT_DONE, EXIT_DONE])
    result = begin(plan, backend)
    assert (len(backend.taken), result.ended_early, result.interrupted) == (3, [plan.requests[1].run], False)
    again = begin(plan, backend)
    assert (again.started, again.ended_early) == ([], [plan.requests[1].run])
    assert begin(plan, backend, resume=True).started == [plan.requests[1].run]


def test_signal_after_a_run_is_not_its_executors(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    begin(planned(tmp_path, on="local"), TurnBackend([EXIT_DONE] * 3))
    assert signal.getsignal(signal.SIGTERM) is before


def test_command_exits_1_where_a_point_has_ended(
    tmp_path: Path, queue: QueueBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path)
    begin(plan, queue, at_once=1)
    queue.end(plan.requests[0].run, EXIT_FAILURE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exit) as ended:
        tasks.sweep(Context(), config="config.toml", on="printer", nproc="1", grid=list(RATES), at_once="1", json=True)
    printed = json.loads(capsys.readouterr().out)
    assert (ended.value.code, printed["ended_early"], printed["waiting"]) == (FAILED, [plan.requests[0].run], 1)
    assert len(printed["points"]) == 3


def test_interrupted_sweep_goes_on_with_the_same_command(tmp_path: Path) -> None:
    plan, backend = planned(tmp_path, on="local"), TurnBackend([EXIT_DONE, EXIT_REQUEUE, EXIT_DONE, EXIT_DONE])
    result = begin(plan, backend)
    assert (len(backend.taken), result.interrupted, result.ended_early) == (2, True, [])
    assert begin(plan, backend).started == [request.run for request in plan.requests[1:]]


def test_run_of_another_machine_is_taken_over_on_request_alone(tmp_path: Path) -> None:
    plan, backend = planned(tmp_path, on="local"), TurnBackend([EXIT_DONE, EXIT_DONE, EXIT_DONE])
    store = register_run(plan.requests[0], resume=False, files={}).store
    body = {**(read_record(store, journal.REQUEST) or {}), "host": "another"}
    store.put(journal.REQUEST, json.dumps(body).encode())
    number = journal.begin(store, ["another"], "test")
    with pytest.raises(UserError) as error:
        begin(plan, backend)
    assert (error.value.problems[0].path, backend.taken) == ("run.uri", [])
    journal.finish(store, number, EXIT_REQUEUE)
    assert len(begin(plan, backend).started) == 3


def test_stopped_point_does_not_interrupt_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, backend = planned(tmp_path, on="local"), TurnBackend([EXIT_REQUEUE, EXIT_DONE, EXIT_DONE])
    stop_first(backend, monkeypatch)
    result = begin(plan, backend)
    assert (len(backend.taken), result.interrupted, result.ended_early) == (3, False, [plan.requests[0].run])


def stop_first(backend: TurnBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `fab stop` end the first run while it is trained."""
    submit: Callable[..., Submission] = backend.submit

    def stopping(request: RunRequest, *given: Any) -> Submission:
        if not backend.taken:
            open_store(request.run).put(journal.STOP, b"{}")
        return submit(request, *given)

    monkeypatch.setattr(backend, "submit", stopping)


def test_table_has_the_lowest_validation_loss_first(tmp_path: Path, queue: QueueBackend) -> None:
    plan = planned(tmp_path)
    sweep = begin(plan, queue, at_once=2).sweep
    for request, losses in zip(plan.requests, ([3.0, float("nan")], [2.5, 2.75]), strict=False):
        record_steps(open_store(request.run), losses)
        queue.end(request.run, EXIT_DONE)
    found = status.read(load_sweep(sweep.store))
    assert [row["values"]["optimizer.lr"] for row in found["points"]] == ["0.02", "0.01", "0.03"]
    best, diverged, last = found["points"]
    assert (best["validation_loss"], best["best_validation_loss"], best["best_validation_step"]) == (2.75, 2.5, 10)
    assert (diverged["validation_loss"], diverged["step"]) == (3.0, 20)
    assert [row["outcome"] for row in found["points"]] == [status.DONE, status.DONE, status.NOT_STARTED]
    assert last["best_validation_loss"] is None
    assert [line.split()[0] for line in status.lines(found)[1:]] == ["0.02", "0.01", "0.03"]


def test_held_jobs_are_named_once_with_their_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a sweep whose folder is reached by a link, as its jobs go by the name that was requested."""
    backend = ArrayQueueBackend()
    monkeypatch.setitem(backends.MODULES, "printer", "tests.launch.test_backends")
    monkeypatch.setattr("tests.launch.test_backends.BACKEND", backend)
    plan = planned(tmp_path)
    begin(plan, backend)
    backend.queued.remove(plan.requests[1].run)
    (tmp_path / "link").symlink_to(plan.uri)
    sweep = load_sweep(open_store(f"{tmp_path}/link"))
    data = status.read(sweep)
    found = status.with_held_jobs(data, status.read_held_jobs(sweep, data))
    assert [row["held"] and row["held"]["job"] for row in found["points"]] == ["7", None, "7"]
    assert status.lines(found)[4:] == ["job 7 is held (paper jam); fix: pull; so are 1 more"]


def test_table_is_shown_where_the_queue_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(ArrayQueueBackend):
        def held_jobs(self, sweep: str, runs: Sequence[str]) -> dict[str, HeldJob]:
            raise UserError("the queue does not answer")

    backend = Silent()
    monkeypatch.setitem(backends.MODULES, "printer", "tests.launch.test_backends")
    monkeypatch.setattr("tests.launch.test_backends.BACKEND", backend)
    plan = planned(tmp_path)
    begin(plan, backend)
    capsys.readouterr()
    tasks.sweep_status(Context(), sweep=plan.uri, json=True)
    printed = capsys.readouterr()
    assert [row["held"] for row in json.loads(printed.out)["points"]] == [None] * 3
    assert printed.err.count("does not answer") == 1


@pytest.mark.parametrize(("code", "outcome"), [(EXIT_DONE, status.DONE), (EXIT_CONFIG, status.ENDED_EARLY)])
def test_outcome_without_a_journal_is_that_of_the_events(
    tmp_path: Path, queue: QueueBackend, code: int, outcome: str
) -> None:
    plan = planned(tmp_path)
    sweep = begin(plan, queue, at_once=1).sweep
    assert status.read_outcomes(sweep) == [status.UNFINISHED, status.NOT_STARTED, status.NOT_STARTED]
    open_store(plan.requests[0].run).put(
        "events/000001-00000.jsonl", encode({"event": "stopped", "exit_code": code, "time": "2026-11-26T12:00:00Z"})
    )
    assert status.read_outcomes(sweep)[0] == outcome


def test_refused_record_ends_the_reading_of_other_runs(
    tmp_path: Path, queue: QueueBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path)
    sweep = begin(plan, queue).sweep
    wrong, long, _ = (open_store(request.run) for request in plan.requests)
    wrong.put(journal.attempt_key(1), b"{}")
    for part in range(5 * status.THREADS):
        long.put(PartName(1, part).key(STEPS), encode({"step": part}))
    under_way, ended, read, begun = threading.Semaphore(0), threading.Event(), LocalStore.read, list[str]()

    def wait_and_read(store: LocalStore, key: str) -> tuple[bytes, str]:
        if key.startswith(STEPS):
            begun.append(key)
            under_way.release()
            ended.wait()
        elif key.endswith(journal.attempt_key(1)):
            for _ in range(status.THREADS):
                under_way.acquire()
        return read(store, key)

    class Threads(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr(LocalStore, "read", wait_and_read)
    monkeypatch.setattr(status, "ThreadPoolExecutor", Threads)
    with pytest.raises(UserError):
        status.read_rows(sweep)
    assert len(begun) == status.THREADS


def search(tmp_path: Path, **flags: Any) -> SearchPlan:
    file = tmp_path / "config.toml"
    tmp_path.mkdir(exist_ok=True)
    file.write_text(settings("runs/rates"))
    given = {"space": ("optimizer.lr=log:1e-4..1e-1",), "search": "optuna", "trials": "5", "set": ("eval.every=10",)}
    return plan_search(
        SweepFlags(str(file), **{"on": "local", "nproc": "1", **given, **flags}), None, backends.load_all(), tmp_path
    )


def drawn(plan: SearchPlan, codes: list[int], resume: bool = False) -> SweepStart:
    return start_search(plan, StartOptions(TurnBackend(codes), Path("/"), resume, None, None, lambda line: None))


def test_search_that_was_cut_off_draws_the_same_points(tmp_path: Path) -> None:
    whole = drawn(search(tmp_path / "a"), [EXIT_DONE] * 5)
    cut = drawn(search(tmp_path / "b"), [EXIT_DONE, EXIT_REQUEUE])
    assert (cut.interrupted, len(cut.sweep.points)) == (True, 2)
    drawn(search(tmp_path / "b", trials="3"), [EXIT_DONE] * 2)
    again = drawn(search(tmp_path / "b"), [EXIT_DONE] * 2)
    assert [point.values for point in again.sweep.points] == [point.values for point in whole.sweep.points]
    found = status.read(load_sweep(again.sweep.store))["points"]
    losses = [row["best_validation_loss"] for row in found]
    assert (losses, len(losses)) == (sorted(losses), 5)
    with pytest.raises(UserError) as error:
        drawn(search(tmp_path / "b", space=("optimizer.lr=1e-4..1e-1",)), [])
    assert [line.path for line in error.value.problems] == ["--space"]
    with pytest.raises(UserError) as error:
        register_sweep(planned(tmp_path / "b", on="local"))
    assert [line.path for line in error.value.problems] == ["--grid"]


def test_search_goes_by_the_losses_before() -> None:
    space, trials, off = parse_space(["optimizer.lr=log:1e-4..1e-1"], []), list[Trial](), list[float]()
    for number in range(20):
        values = draw_values(space, 1, trials)
        off.append(abs(math.log(float(values["optimizer.lr"]) / 0.003)))
        # A point without a finite loss is the worst, one that ended early says nothing.
        trials.append(Trial(values, None if number == 3 else math.inf if number == 5 else off[-1]))
    assert sum(off[12:]) / 8 < sum(off[:10]) / 10


def test_search_ends_where_its_space_is_used_up(tmp_path: Path) -> None:
    plan = search(tmp_path, space=("train.micro_batch=1..4",), set=("eval.every=10", "train.global_batch=4"))
    result = drawn(plan, [EXIT_DONE] * 3)
    assert sorted(point.values["train.micro_batch"] for point in result.sweep.points) == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"search": "grid"}, "--search"),
        ({"grid": RATES}, "--grid"),
        ({"space": ()}, "--space"),
        ({"space": ("optimizer.lr=0..1", "optimizer.lr=0.1,0.2")}, "--space"),
        ({"space": ("optimizer.lr=log:0..1",)}, "--space"),
        ({"space": ("optimizer.lr=2..1",)}, "--space"),
        ({"space": ("optimizer.lr=1..",)}, "--space"),
        ({"space": ("optimizer.lr=0.1",)}, "--space"),
        ({"space": ("run.uri=a,b",)}, "--space"),
        ({"space": ("optimizer.lrr=1..2",)}, "optimizer.lrr"),
        ({"trials": None}, "--trials"),
        ({"trials": "0"}, "--trials"),
        ({"set": ()}, "eval.every"),
        ({"on": "slurm"}, "--search"),
    ],
)
def test_wrong_search_is_one_line(tmp_path: Path, flags: dict[str, Any], path: str) -> None:
    with pytest.raises(UserError) as error:
        search(tmp_path, **flags)
    assert [line.path for line in error.value.problems] == [path]
    assert not (tmp_path / "runs").exists()


def test_search_without_optuna_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError) as error:
        search(tmp_path)
    assert [line.fix for line in error.value.problems] == ["pip install 'lustrain[search]'"]


def record_steps(store: ObjectStore, losses: list[float]) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    steps = [
        {"step": 10 * number, "attempt": 1, "time": now, "loss": 1.0, "step_seconds": 1.0, "eval_loss": loss}
        for number, loss in enumerate(losses, 1)
    ]
    store.put("metrics/000001-00000.jsonl", b"".join(map(encode, steps)))
