"""A backend of somebody else's is a module and a row of the registry: nothing else of `launch/` knows backends by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from invoke import Context

from launch import backends, logs, runs, status, tasks
from launch.backends import HeldJob, LaunchPlan, LogLine, Submission
from launch.flags import TrainFlags
from launch.request import RunRequest, Target
from launch.submit import dry_run, submit
from lustrain.cluster import Cluster
from lustrain.problem import UNREACHABLE, Problem, UserError
from tests.launch.test_request import cluster, config, resolve
from tests.processes import command_line, wait_until
from tests.storage.objects import objects
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.run.journal import CONFIG, REQUEST, STOP, begin
from trainer.storage import ObjectStore, open_store


class PrinterBackend:
    """Starts runs by printing them; `refusal` is the exit code with which it refuses all."""

    own_flags = ("queue",)
    uses_groups = True
    scheduler_can_replace_nodes = False
    supervised_by_caller = False
    supervises_ranges = False
    refusal: int | None = None

    def serves(self, cluster: Cluster) -> bool:
        return cluster.backend == "ec2"

    def default_ranks(self, target: Target, problems: list[Problem]) -> int:
        return target.group.gpus if target.group else 0

    def options(self, flags: TrainFlags, target: Target, problems: list[Problem]) -> str:
        return flags.queue or "paper"

    def plan(self, request: RunRequest, folder: Path, environ: Mapping[str, str]) -> LaunchPlan:
        return LaunchPlan(("lp", request.options), {"launch/page": request.run})

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        """It takes everything."""

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        if self.refusal is not None:
            raise UserError("out of paper; fix: add some", self.refusal)
        return Submission(("printed",), {"run": request.run}, job={"page": 7})

    def describe(self, job: Mapping[str, Any]) -> str:
        return f"page {job['page']}"

    def held_job(self, run: str) -> HeldJob | None:
        return HeldJob("7", "paper jam", "pull")

    def cancel(self, run: str, job: Mapping[str, Any] | None) -> list[str]:
        return ["page 7"] if job else []

    def read_log(
        self, run: str, job: Mapping[str, Any] | None, launch: int | None, more: Callable[[], bool]
    ) -> Iterator[LogLine]:
        yield LogLine("printed", f"page {(job or {})['page']}")


BACKEND = PrinterBackend()


@pytest.fixture
def request_to_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRequest:
    monkeypatch.setitem(backends.MODULES, "printer", __name__)
    monkeypatch.setattr(BACKEND, "refusal", None)
    on = cluster(backend="ec2", slurm=None, nodes={"auto_scaling_groups": ["a"]}, runs_uri=str(tmp_path))
    return resolve(
        TrainFlags("config.toml", on="printer", name="first"), config(tmp_path, global_batch=64), on, tmp_path
    )


def test_its_cluster_and_flags_make_a_request(request_to_print: RunRequest) -> None:
    assert (request_to_print.backend, request_to_print.options) == ("printer", "paper")
    assert request_to_print.policy.ranks_per_node == 8


def test_flag_that_two_backends_have_is_valid_with_both(request_to_print: RunRequest, tmp_path: Path) -> None:
    flags = TrainFlags("config.toml", on="printer", nproc="1", queue="A4")
    assert resolve(flags, config(tmp_path, global_batch=64), None, tmp_path).options == "A4"


def test_dry_run_shows_its_files_and_command_and_writes_nothing(request_to_print: RunRequest, tmp_path: Path) -> None:
    _, data = dry_run(request_to_print, BACKEND.plan(request_to_print, tmp_path, {}))
    assert data["commands"] == [["lp", "paper"]]
    assert set(data["files"]) == {request_to_print.config_uri, f"{request_to_print.run}/launch/page"}
    assert not Path(request_to_print.run).exists()


def test_submission_is_recorded_and_shown(request_to_print: RunRequest, tmp_path: Path) -> None:
    assert submit(request_to_print, BACKEND, tmp_path, {}, resume=False).lines == ("printed",)
    store = open_store(request_to_print.run)
    assert (runs.read_record(store, runs.SUBMITTED) or {})["printer"] == {"page": 7}
    state = status.with_held_job(status.read(store, runs.read_record(store, REQUEST)), BACKEND.held_job(store.uri))
    assert status.lines(state)[0].endswith("held by Printer: a person has to release its job")
    assert [entry.shown() for entry in logs.read(store, {"on": "printer"}, rank=None, launch=None, follow=False)] == [
        "page 7: printed"
    ]
    assert {"page 7", "job 7 is held (paper jam); fix: pull"} <= set(status.lines(state))


def test_stop_cancels_its_job(request_to_print: RunRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    tasks.stop(Context(), run=request_to_print.run, now=True, json=True)
    assert json.loads(capsys.readouterr().out)["cancelled"] == ["page 7"]


@pytest.mark.parametrize(("code", "lines"), [(EXIT_REQUEUE, 2), (EXIT_DONE, 1)])
def test_interrupted_run_says_how_to_go_on(
    request_to_print: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, lines: int
) -> None:
    monkeypatch.setattr(PrinterBackend, "submit", lambda *words: Submission(("ended",), {}, code=code))
    said = submit(request_to_print, BACKEND, tmp_path, {}, resume=False).lines
    assert len(said) == lines
    assert ("--resume" in said[-1]) == (code == EXIT_REQUEUE)


@pytest.mark.parametrize(("code", "registered"), [(2, False), (UNREACHABLE, True)])
def test_refused_run_is_unregistered_unless_the_job_may_exist(
    request_to_print: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, registered: bool
) -> None:
    monkeypatch.setattr(BACKEND, "refusal", code)
    with pytest.raises(UserError):
        submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    assert (Path(request_to_print.run) / REQUEST).exists() is registered


@pytest.mark.parametrize("just_now", [False, True])
def test_name_that_is_taken_is_refused_and_its_run_stays(
    request_to_print: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, just_now: bool
) -> None:
    submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    before = objects(open_store(request_to_print.run))
    if just_now:
        monkeypatch.setattr(runs, "read_record", lambda *words: None)
    with pytest.raises(UserError) as error:
        submit(replace(request_to_print, config="[run]"), BACKEND, tmp_path, {}, resume=False)
    assert [line.path for line in error.value.problems] == ["run.uri"]
    assert objects(open_store(request_to_print.run)) == before


def test_resume_takes_an_earlier_stop_away(request_to_print: RunRequest, tmp_path: Path) -> None:
    submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    store = open_store(request_to_print.run)
    store.put(STOP, b"{}")
    submit(request_to_print, BACKEND, tmp_path, {}, resume=True)
    assert STOP not in objects(store)


def test_run_whose_launch_has_begun_stays_registered(
    request_to_print: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_and_fail(*words: object) -> Submission:
        begin(open_store(request_to_print.run), ["node1"], "test")
        raise UserError("no")

    monkeypatch.setattr(PrinterBackend, "submit", begin_and_fail)
    with pytest.raises(UserError):
        submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    assert {REQUEST, CONFIG} <= objects(open_store(request_to_print.run)).keys()


def test_refused_resume_leaves_the_run_as_it_was(
    request_to_print: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    store = open_store(request_to_print.run)
    runs.save_job(store, "slurm", {"job": 7})
    store.put(STOP, b"{}")
    before = objects(store)
    monkeypatch.setattr(BACKEND, "refusal", 2)
    with pytest.raises(UserError):
        submit(replace(request_to_print, config="[run]"), BACKEND, tmp_path, {}, resume=True)
    assert objects(store) == before


@pytest.mark.parametrize("supervises", [True, False])
def test_resume_beside_its_supervisor_is_refused(
    request_to_print: RunRequest, tmp_path: Path, supervises: bool
) -> None:
    request_to_print = replace(request_to_print, supervised_by_caller=supervises)
    submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    with subprocess.Popen([sys.executable, "-c", "input()", "train"], stdin=subprocess.PIPE) as supervisor:
        wait_until(lambda: command_line(supervisor.pid))
        record = Path(request_to_print.run) / REQUEST
        record.write_text(json.dumps({**json.loads(record.read_text()), "pid": supervisor.pid}))
        with pytest.raises(UserError) if supervises else nullcontext():
            submit(request_to_print, BACKEND, tmp_path, {}, resume=True)
        supervisor.communicate(b"\n")


def test_resume_through_a_link_is_refused(request_to_print: RunRequest, tmp_path: Path) -> None:
    submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    (tmp_path / "link").symlink_to(request_to_print.run)
    linked = replace(request_to_print, run=f"{tmp_path}/link")
    with pytest.raises(UserError) as error:
        submit(linked, BACKEND, tmp_path, {}, resume=True)
    assert error.value.problems[0].path == "run.uri"


def test_run_of_an_unknown_backend_can_still_be_read(request_to_print: RunRequest, tmp_path: Path) -> None:
    submit(request_to_print, BACKEND, tmp_path, {}, resume=False)
    del backends.MODULES["printer"]
    store = open_store(request_to_print.run)
    state = status.read(store, runs.read_record(store, REQUEST))
    assert json.dumps(state)
    assert backends.load(str(state["on"])) is None
    assert status.lines(state)
