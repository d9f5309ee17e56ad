"""What a scheduler's programs are asked, and what is made of their answers: planted programs print what real ones do."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch import logs, runs
from launch.backends import LaunchPlan, kubernetes, slurm, slurm_executor
from launch.backends.slurm_executor import Allocation, CommandJournal, Runtime
from launch.request import RunRequest
from launch.submit import submit_array
from launch.supervisor.executor import TemporarilyUnavailable
from launch.supervisor.policy import ExtraNodes, RestartPolicy
from lustrain.problem import FAILED, UNREACHABLE, USAGE, UserError
from tests.fab import Fab
from tests.lab.training import config
from tests.storage.objects import objects
from trainer.run import journal
from trainer.run.journal import REQUEST, STOP
from trainer.storage import open_store

RUN = "/shared/first"
OPTIONS = slurm.SlurmOptions(None, None, None, None, 0, False, None)
SLURM = RunRequest(RUN, "slurm", "", RestartPolicy(), 1, 0, f"{RUN}/stop", 60, None, OPTIONS, False)
PODS = kubernetes.KubernetesOptions("example.org/a@sha256:1", None, "ml", None, None, None, None, 0, 0, (), (), ())
KUBERNETES = replace(SLURM, backend="kubernetes", options=PODS)
SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH; every program in it is planted."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def plant(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def queued(number: int, state: str = "RUNNING", reason: str = "None", run: str = RUN) -> str:
    """A line of squeue, as a shell prints it."""
    return f"echo '{number}|{state}|{reason}|||{run}'"


def code_of(error: pytest.ExceptionInfo[UserError]) -> int:
    return error.value.exit_code


def test_programs_see_of_the_environment_what_is_named_only(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_EXPORT", "SQUEUE_STATES", "SLURM_CLUSTERS", "HF_TOKEN"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    plant(planted, "sbatch", f"/usr/bin/env > {planted}/seen; echo 7")
    assert slurm.submit("", planted, RUN, "first") == 7
    seen = {line.partition("=")[0] for line in (planted / "seen").read_text().splitlines()}
    assert seen & {"SBATCH_PARTITION", "SBATCH_EXPORT", "SQUEUE_STATES", "SLURM_CLUSTERS", "HF_TOKEN"} == set()
    assert {"PATH", "SLURM_CONF"} <= seen


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        ("exit 0", []),
        (queued(12), [12]),
        (f"{queued(12, run='/shared/other')}; {queued(9)}; {queued(13)}; echo 'A banner'", [9, 13]),
    ],
)
def test_jobs_of_a_run_are_those_with_its_uri_as_comment(planted: Path, said: str, numbers: list[int]) -> None:
    plant(planted, "squeue", f"case $* in *--all*) {said} ;; esac")
    assert [job.number for job in slurm.jobs(RUN, "first")] == numbers


def test_machine_without_sbatch_is_one_line(planted: Path) -> None:
    with pytest.raises(UserError) as error:
        slurm.BACKEND.check(SLURM, LaunchPlan((), {slurm.SCRIPT: ""}), planted, resume=False)
    assert [(line.path, code_of(error)) for line in error.value.problems] == [("--on", USAGE)]


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        ("PENDING", "launch failed requeued held", True),
        ("PENDING", "JobHeldUser", True),
        ("PENDING", "JobHoldMaxRequeue", True),
        ("PENDING", "Resources", False),
        ("SPECIAL_EXIT", "job requeued in special exit state", True),
        ("RUNNING", "launch failed requeued held", False),
    ],
)
def test_held_job_is_told_from_one_that_waits(planted: Path, state: str, reason: str, held: bool) -> None:
    plant(planted, "squeue", queued(7, state, reason))
    assert [job.held for job in slurm.jobs(RUN, "first")] == [reason if held else ""]


@pytest.mark.parametrize(
    ("state", "nodes", "batch_host", "lost"),
    [
        ("RUNNING", "b,c", "a", True),
        ("RUNNING", "b[2-3]", "b1", True),
        ("RUNNING", "a,b", "a", False),
        ("RUNNING", "b[1-3]", "b2", False),
        ("RUNNING", "", "", False),
        ("COMPLETING", "b,c", "a", False),
    ],
)
def test_job_that_lost_its_batch_host_is_named(
    planted: Path, state: str, nodes: str, batch_host: str, lost: bool
) -> None:
    plant(planted, "squeue", f"echo '7|{state}|None|{nodes}|{batch_host}|{RUN}'")
    plant(planted, "scontrol", 'case "$*" in "show hostnames b[2-3]") echo b2 b3;; *) echo b1 b2 b3;; esac')
    held = slurm.BACKEND.held_job(RUN)
    assert (held is not None) == lost
    if held:
        assert held.why.endswith(batch_host)
        assert held.fix.startswith("scontrol requeue 7")


@pytest.mark.parametrize("record", [{"job": "9_1", "task": 1, "log": "x"}, {"task": 1}])
def test_task_of_a_sweeps_array_is_its_runs_job(planted: Path, tmp_path: Path, record: dict[str, Any]) -> None:
    """Also where sbatch's answer was lost, and its number with it."""
    sweep = f"{tmp_path}/rates"
    lines = [f"9_{task}|{state}|||{sweep}" for task, state in {0: "RUNNING|None", 1: "PENDING|JobHeldUser"}.items()]
    lines += ["7_1|RUNNING|None|||/other/rates", f"8_11|RUNNING|None|||{sweep}"]
    plant(planted, "squeue", f"case $* in *--array*) printf '%s\\n' {shlex.join(lines)} ;; esac")
    assert slurm.jobs_of(f"{sweep}/first") == []
    runs.save_job(open_store(f"{sweep}/first"), "slurm", record)
    assert slurm.jobs_of(f"{sweep}/first") == [slurm.Job("9_1", "JobHeldUser")]


def test_array_whose_answer_is_lost_keeps_its_tasks_known(planted: Path, tmp_path: Path) -> None:
    """What is queued for the same sweep is of an earlier start, and not taken for the new array."""
    sweep = f"{tmp_path}/rates"
    requests = {index: replace(SLURM, run=f"{sweep}/{name}") for index, name in {1: "a", 3: "b"}.items()}
    plant(planted, "sbatch", f"case $* in *--test-only*) exit 0 ;; esac; {TIMED_OUT}")
    plant(planted, "squeue", f"echo '5|RUNNING|None|||{sweep}'")
    plan = LaunchPlan((), {slurm.ARRAY_SCRIPT: ""})
    with pytest.raises(UserError) as error:
        submit_array(requests, set(), slurm.BACKEND, plan, sweep, planted)
    assert code_of(error) == UNREACHABLE
    plant(planted, "squeue", f"case $* in *--array*) echo '6_3|PENDING|None|||{sweep}' ;; esac")
    assert [slurm.jobs_of(request.run) for request in requests.values()] == [[], [slurm.Job("6_3")]]
    plant(planted, "sbatch", "case $* in *--test-only*) exit 0 ;; esac; echo 'sbatch: error: no' >&2; exit 1")
    with pytest.raises(UserError):
        submit_array({0: replace(SLURM, run=f"{sweep}/c")}, set(), slurm.BACKEND, plan, sweep, planted)
    assert runs.read_record(open_store(f"{sweep}/c"), REQUEST) is None


@pytest.mark.parametrize("begun", [False, True])
def test_refused_array_leaves_its_sweep_as_it_was(planted: Path, tmp_path: Path, begun: bool) -> None:
    sweep = f"{tmp_path}/rates"
    requests = {index: replace(SLURM, run=f"{sweep}/{index}") for index in range(2)}
    plan = LaunchPlan((), {slurm.ARRAY_SCRIPT: "first"})
    store = open_store(sweep)

    def held() -> dict[str, bytes]:
        # A folder that was a store keeps its lock.
        return {key: content for key, content in objects(store).items() if "/.lustrain/" not in key}

    plant(planted, "squeue", "exit 0")
    if begun:
        plant(planted, "sbatch", "case $* in *--test-only*) exit 0 ;; esac; echo 7")
        submit_array(requests, set(), slurm.BACKEND, plan, sweep, planted)
    before = held()
    plant(planted, "sbatch", "case $* in *--test-only*) exit 0 ;; esac; echo 'sbatch: error: no' >&2; exit 1")
    again = replace(plan, files={slurm.ARRAY_SCRIPT: "second"})
    with pytest.raises(UserError):
        submit_array(requests, set(requests) if begun else set(), slurm.BACKEND, again, sweep, planted)
    assert held() == before


def test_array_of_an_unknown_account_registers_nothing(planted: Path, tmp_path: Path) -> None:
    sweep = f"{tmp_path}/rates"
    options = replace(OPTIONS, account="research")
    requests = {index: replace(SLURM, run=f"{sweep}/{index}", options=options) for index in range(2)}
    plan = slurm.BACKEND.plan_array(requests, sweep, planted, {}, None)
    assert plan is not None
    plant(planted, "sacctmgr", "echo root")
    plant(planted, "sbatch", f": > {planted}/asked; echo 7")
    with pytest.raises(UserError) as error:
        submit_array(requests, set(), slurm.BACKEND, plan, sweep, planted)
    assert [line.path for line in error.value.problems] == ["--account"]
    assert not (planted / "asked").exists()
    assert not Path(sweep).exists()


def test_held_jobs_of_a_sweep_are_one_look_at_the_queue(planted: Path) -> None:
    """Its array's tasks by their index, and its runs that are jobs of their own."""
    lines = [
        "9_0|PENDING|JobHeldUser|||/shared/rates",
        "9_1|RUNNING|None|b|a|/shared/rates",
        "9_7|PENDING|JobHeldUser|||/shared/rates",
        "12_N/A|REQUEUE_HOLD|launch failed requeued held|||/shared/rates/c",
        "13_N/A|PENDING|JobHeldAdmin|||/shared/other/c",
    ]
    plant(planted, "squeue", f"echo look >> {planted}/looks; printf '%s\\n' {shlex.join(lines)}")
    held = slurm.BACKEND.held_jobs("/shared/rates", [f"/shared/rates/{name}" for name in "abc"])
    assert {run: (job.job, job.why) for run, job in held.items()} == {
        "/shared/rates/a": ("9_0", "JobHeldUser"),
        "/shared/rates/b": ("9_1", "its script is lost with node a"),
        "/shared/rates/c": ("12", "launch failed requeued held"),
    }
    assert (planted / "looks").read_text().count("look") == 1


def test_following_names_a_held_job_once(planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The queue is one of many users: it is not looked at as often as the log."""
    store, uri = open_store(f"{tmp_path}/first"), f"{tmp_path}/first"
    request = {"version": 1, "on": "slurm", "run": uri, "after": 0}
    store.put(REQUEST, json.dumps(request).encode())
    runs.save_job(store, "slurm", {"job": 7, "log": f"{tmp_path}/log"})
    plant(
        planted,
        "squeue",
        f"echo look >> {planted}/looks; case $* in *--array*) ;; *) {queued(7, 'PENDING', 'JobHeldUser', uri)} ;; esac",
    )
    waits = 0

    def sleep(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 2 * logs.LOOKS_PER_QUEUE:
            journal.finish(store, journal.begin(store, ["n"], "test"), 0)
            (tmp_path / "log").write_text("done\n")

    found = logs.read(store, request, rank=None, launch=None, follow=True, sleep=sleep)
    assert [entry.text for entry in found] == ["done"]
    assert capsys.readouterr().err.count("scontrol release 7") == 1
    assert (planted / "looks").read_text().count("look") == 2


@pytest.mark.parametrize("squeue", [SILENT, None])
def test_a_queue_that_does_not_answer_is_not_an_empty_one(planted: Path, squeue: str | None) -> None:
    if squeue:
        plant(planted, "squeue", squeue)
    with pytest.raises(UserError) as error:
        slurm.jobs(RUN, "first")
    assert code_of(error) == UNREACHABLE


@pytest.mark.parametrize(
    ("sbatch", "squeue", "job"),
    [
        ("echo 'Welcome to X'; echo '123;west'; echo bye", SILENT, 123),
        (TIMED_OUT, queued(44), 44),
        ("echo 'Submitted'", queued(45), 45),
    ],
)
def test_a_job_that_slurm_has_taken_is_found(planted: Path, sbatch: str, squeue: str, job: int) -> None:
    plant(planted, "sbatch", sbatch)
    plant(planted, "squeue", squeue)
    assert slurm.submit("", planted, RUN, "first") == job


@pytest.mark.parametrize(
    ("sbatch", "squeue"), [(TIMED_OUT, SILENT), (TIMED_OUT, "exit 0"), ("echo 'Submitted'", "exit 0")]
)
def test_whether_slurm_took_job_may_be_unknown_and_that_is_said(planted: Path, sbatch: str, squeue: str) -> None:
    plant(planted, "sbatch", sbatch)
    plant(planted, "squeue", squeue)
    with pytest.raises(UserError) as error:
        slurm.submit("", planted, RUN, "first")
    assert code_of(error) == UNREACHABLE


@pytest.mark.parametrize(
    ("lines", "code", "told"),
    [
        (
            [
                "sbatch: lua: this job will be charged",
                "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy",
            ],
            USAGE,
            "Batch job submission failed: Job violates accounting/QOS policy",
        ),
        (["sbatch: error: invalid partition specified: x", "sbatch: see docs"], USAGE, "invalid partition specified"),
        (["sbatch: lua: hello", "sbatch: error: Unable to contact slurm controller"], UNREACHABLE, "Unable to contact"),
    ],
)
def test_of_what_sbatch_prints_the_error_is_told(planted: Path, lines: list[str], code: int, told: str) -> None:
    plant(planted, "sbatch", "".join(f"echo '{line}' >&2; " for line in lines) + "exit 1")
    with pytest.raises(UserError) as error:
        slurm.BACKEND.check(SLURM, LaunchPlan((), {slurm.SCRIPT: ""}), planted, resume=False)
    assert code_of(error) == code
    assert str(error.value).startswith(f"sbatch: {told}")


@pytest.mark.parametrize(
    ("sacctmgr", "refused"),
    [
        ("echo root; echo normal", ["--account", "--qos"]),
        ("echo root; echo normal; [ $4 = qos ] || echo research", ["--qos"]),
        ("echo root; echo normal; echo research; echo high", []),
        ("echo another", []),
        ("echo 'You are not running a supported accounting_storage plugin' >&2; exit 1", []),
    ],
)
def test_account_that_accounting_does_not_know_is_refused(planted: Path, sacctmgr: str, refused: list[str]) -> None:
    """sbatch takes any name where no limits are enforced."""
    plant(planted, "sacctmgr", sacctmgr)
    plant(planted, "sbatch", f"touch {planted}/asked")
    plant(planted, "squeue", "exit 0")
    plant(planted, "touch", f": > {planted}/asked")
    found = []
    for account, qos in (("Research", None), (None, "high")):
        request = replace(SLURM, options=replace(OPTIONS, account=account, qos=qos))
        try:
            slurm.BACKEND.check(request, LaunchPlan((), {slurm.SCRIPT: ""}), planted, resume=False)
        except UserError as error:
            found.append((str(error).partition(" ")[0], error.exit_code))
    assert found == [(flag, USAGE) for flag in refused]
    assert (planted / "asked").exists() is (len(refused) < 2)


@pytest.mark.parametrize(
    ("lines", "code", "told"),
    [
        (
            [
                "",
                "Error when retrieving token from sso: Token has expired and refresh failed",
                'E1125 10:00:00.000000 7 memcache.go:265] "Unhandled Error" err="getting credentials"',
                "Unable to connect to the server: getting credentials: exec: executable aws failed with exit code 255",
            ],
            UNREACHABLE,
            "Unable to connect to the server: getting credentials",
        ),
        (
            ["Warning: v1 is deprecated", 'Error from server (NotFound): namespaces "ml" not found'],
            USAGE,
            'namespaces "ml" not found',
        ),
        (["Warning: x", "error: jobs is Forbidden: User cannot create"], FAILED, "jobs is Forbidden"),
        (["error: pods is forbidden: User may not"], FAILED, "pods is forbidden"),
    ],
)
def test_of_what_kubectl_prints_the_error_is_told(planted: Path, lines: list[str], code: int, told: str) -> None:
    plant(planted, "kubectl", "".join(f"echo '{line}' >&2; " for line in lines) + "exit 1")
    plan = LaunchPlan((), {kubernetes.OBJECTS: "{}"})
    with pytest.raises(UserError) as error:
        kubernetes.BACKEND.submit(KUBERNETES, plan, planted, open_store(str(planted)), None)
    assert code_of(error) == code
    assert str(error.value).startswith(f"kubectl: {told}")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("""echo '{"status": {"allowed": true}}'""", 0),
        ("""echo '{"status": {"allowed": false}}'""", FAILED),
        # Only a server that says no is a reason to refuse.
        ("""echo '{"kind": "SelfSubjectAccessReview"}'""", 0),
        ("echo 'Error from server (Forbidden): reviews is forbidden' >&2; exit 1", FAILED),
        ("echo 'Unable to connect to the server' >&2; exit 1", UNREACHABLE),
    ],
)
def test_right_to_delete_pods_is_looked_up_first(planted: Path, answer: str, code: int) -> None:
    plant(planted, "kubectl", f'read -r review; echo "$review" > {planted}/review; {answer}')
    found = 0
    try:
        kubernetes.refuse_without_rights(KUBERNETES)
    except UserError as error:
        found = error.exit_code
    assert found == code
    review = json.loads((planted / "review").read_text())
    assert review["spec"]["resourceAttributes"] == {"namespace": "ml", "verb": "delete", "resource": "pods"}


ABSENT = "echo 'Error from server (NotFound): x \"y\" not found' >&2; exit 1"
FORBIDDEN = "echo 'Error from server (Forbidden): no: RBAC: role.rbac.authorization.k8s.io \"z\" not found' >&2; exit 1"
UNKNOWN = "echo 'error: the server doesn'\\''t have a resource type \"localqueue\"' >&2; exit 1"


NO_OBJECTS = LaunchPlan((), {kubernetes.OBJECTS: '{"items": []}'})


def refused_path(request: RunRequest, folder: Path, *, resume: bool) -> str | None:
    """The path of the one line by which Kubernetes refuses a start; None where it does not."""
    try:
        kubernetes.BACKEND.check(request, NO_OBJECTS, folder, resume=resume)
    except UserError as error:
        (line,) = error.problems
        return line.path
    return None


@pytest.mark.parametrize(
    ("kind", "answer", "path"),
    [
        ("persistentvolumeclaim", ABSENT, "kubernetes.claims"),
        ("serviceaccount", ABSENT, "kubernetes.service_account"),
        ("priorityclass", ABSENT, "--priority"),
        ("localqueue.kueue.x-k8s.io", ABSENT, "--queue"),
        ("localqueue.kueue.x-k8s.io", UNKNOWN, "--queue"),
        # Who may not look at it may still use it.
        ("localqueue.kueue.x-k8s.io", FORBIDDEN, None),
    ],
)
def test_what_a_job_names_has_to_be_there(planted: Path, kind: str, answer: str, path: str | None) -> None:
    """The server takes a Job without looking at any of it."""
    plant(planted, "kubectl", f'echo "$*" >> {planted}/calls; case "$*" in *" {kind} -- y"*) {answer} ;; esac')
    options = replace(PODS, claims=(("/fsx", "y"),), service_account="y", priority="y", queue="y")
    request = replace(KUBERNETES, options=options)
    assert refused_path(request, planted, resume=False) == path
    assert f" {kind} -- y" in (planted / "calls").read_text()


@pytest.mark.parametrize(
    ("run", "ended", "resume", "path"),
    [
        ("/shared/other", True, True, "--name"),
        (RUN, True, False, "--name"),
        (RUN, False, True, "--resume"),
        (RUN, True, True, None),
        (None, True, False, "--on"),
    ],
)
def test_job_of_the_name_is_left_alone_unless_it_may_go(
    planted: Path, run: str | None, ended: bool, resume: bool, path: str | None
) -> None:
    """Without a run there is no kubectl."""
    if run:
        conditions = [{"type": "Complete"}] if ended else []
        job = {"metadata": {"annotations": {kubernetes.RUN: run}}, "status": {"conditions": conditions}}
        answer = f'case "$*" in *"get job"*) echo \'{json.dumps(job)}\' ;; esac'
        plant(planted, "kubectl", f'echo "$*" >> {planted}/calls; {answer}')
    assert refused_path(KUBERNETES, planted, resume=resume) == path
    calls = (planted / "calls").read_text() if run else ""
    assert ("delete" in calls) == ("--dry-run=server" in calls) == (path is None)


def test_refused_run_of_n_to_m_nodes_keeps_its_earlier_job(planted: Path) -> None:
    job = {"metadata": {"annotations": {kubernetes.RUN: RUN}}, "status": {"conditions": [{"type": "Complete"}]}}
    answers = f"""echo "$*" >> {planted}/calls
case "$*" in
*"get job"*) echo '{json.dumps(job)}' ;;
*--validate=false*) echo '{{"status": {{"allowed": false}}}}' ;;
esac"""
    plant(planted, "kubectl", answers)
    supervised = replace(KUBERNETES, supervised_by_caller=True)
    with pytest.raises(UserError) as error:
        kubernetes.BACKEND.check(supervised, NO_OBJECTS, planted, resume=True)
    assert code_of(error) == FAILED
    assert [call for call in (planted / "calls").read_text().splitlines() if "delete" in call] == []


def recorded(folder: Path) -> None:
    """A run that was submitted to Slurm, with a stop object of its own."""
    (folder / "first" / "launch").mkdir(parents=True)
    record = {"version": 1, "on": "slurm", "run": f"{folder}/first", "stop_uri": f"{folder}/stops/first"}
    (folder / "first" / REQUEST).write_text(json.dumps(record))
    (folder / "stops").mkdir()
    (folder / "link").symlink_to(folder / "first")
    (folder / "bin").mkdir()


@pytest.fixture
def fab(fab: Fab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fab:
    """Called in the test's folder, with the programs planted there before all others."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return partial(fab, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("squeue", "code", "cancelled"), [(SILENT, 3, False), ('echo "7|RUNNING|None|||$PWD/first"', 0, True)]
)
def test_stop_now_ends_the_job_or_says_that_it_could_not_ask(
    tmp_path: Path, fab: Fab, squeue: str, code: int, cancelled: bool
) -> None:
    recorded(tmp_path)
    plant(tmp_path / "bin", "squeue", squeue)
    plant(tmp_path / "bin", "scancel", f"echo $1 > {tmp_path}/cancelled")
    done = fab("stop", "link", "--now")
    assert done.code == code, done.err
    assert (tmp_path / "first" / STOP).exists()
    assert (tmp_path / "stops" / "first").exists()
    assert ("cancelled: job 7 of Slurm" in done.out) is cancelled
    assert (tmp_path / "cancelled").exists() is cancelled


@pytest.mark.slow
@pytest.mark.parametrize(("squeue", "cancelled"), [(SILENT, False), ('echo "7|RUNNING|None|||$PWD/first"', True)])
def test_stop_now_cancels_where_its_own_stop_file_is_refused(
    tmp_path: Path, fab: Fab, squeue: str, cancelled: bool
) -> None:
    recorded(tmp_path)
    (tmp_path / "stops").rmdir()
    (tmp_path / "stops").write_text("")
    plant(tmp_path / "bin", "squeue", squeue)
    plant(tmp_path / "bin", "scancel", f"touch {tmp_path}/cancelled")
    done = fab("stop", "first", "--now")
    assert done.code != 0, done.out
    assert "interrupt.stop_uri" in done.err
    assert ("squeue" in done.err) is not cancelled
    assert (tmp_path / "cancelled").exists() is cancelled


@pytest.mark.parametrize(
    ("sacct", "told"),
    [
        ("echo 'CANCELLED by 0|0:15|2026-11-27T03:40:12'", "CANCELLED by 0, exit code 0:15, 2026-11-27T03:40:12"),
        ("echo 'FAILED|7:0|2026-11-27T03:40:12'", "FAILED, exit code 7:0, 2026-11-27T03:40:12"),
        ("echo 'RUNNING|0:0|Unknown'", None),
        ("exit 0", None),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", None),
    ],
)
def test_how_a_forgotten_job_ended_is_asked_of_accounting(planted: Path, sacct: str, told: str | None) -> None:
    plant(planted, "squeue", "exit 0")
    assert slurm.BACKEND.ended_job(RUN, {"job": 7}) is None
    plant(planted, "sacct", f"[ $5 = --jobs=7 ] || exit 9; {sacct}")
    assert slurm.BACKEND.ended_job(RUN, {"job": 7}) == told
    plant(planted, "squeue", f"echo '7|PENDING|None|||{RUN}'")
    assert slurm.BACKEND.ended_job(RUN, {"job": 7}) is None


def test_accounting_that_does_not_answer_leaves_an_end_unknown(planted: Path) -> None:
    plant(planted, "sacct", "echo 'sacct: error: Problem talking to the database' >&2; exit 1")
    with pytest.raises(UserError) as error:
        slurm.ended(7)
    assert code_of(error) == UNREACHABLE


@pytest.mark.slow
def test_held_job_is_named_with_what_releases_it(tmp_path: Path, fab: Fab) -> None:
    recorded(tmp_path)
    plant(tmp_path / "bin", "squeue", 'echo "7|PENDING|launch failed requeued held|||$PWD/first"')
    plant(tmp_path / "bin", "sbatch", "exit 0")
    (tmp_path / "config.toml").write_text(config("first"))
    said = fab("status", "link")
    assert said.code == 0, said.err
    assert "held by Slurm: a person has to release its job" in said.out
    assert "job 7 is held (launch failed requeued held); fix: scontrol release 7, as" in said.out
    train = ("train", "config.toml", "--on", "slurm", "--nproc", "1")
    again = fab(*train, "--resume")
    assert again.code == USAGE, again.out
    assert "job 7 of Slurm is held (launch failed requeued held); fix: scontrol release 7, as" in again.err
    plant(tmp_path / "bin", "squeue", "exit 0")
    taken = fab(*train)
    assert (taken.code, "--resume" in taken.err) == (USAGE, True), taken.err


@pytest.mark.slow
def test_status_is_told_where_slurm_does_not_answer(tmp_path: Path, fab: Fab) -> None:
    recorded(tmp_path)
    plant(tmp_path / "bin", "squeue", SILENT)
    said = fab("status", "first")
    assert (said.code, said.out.count("no rank has started yet")) == (0, 1)
    assert "whether a job waits or runs for" in said.err


@pytest.fixture
def allocation(planted: Path, monkeypatch: pytest.MonkeyPatch) -> Allocation:
    """Of nodes a and b: Slurm reaches a at 127.0.0.1, and b is as B_IS says."""
    plant(planted, "squeue", "echo a,b")
    plant(planted, "scontrol", "echo a; echo b")
    plant(planted, "sinfo", 'echo "a allocated 127.0.0.1"; echo "b $B_IS 10.0.0.2"')
    plant(planted, "srun", f'echo "$*" >> {planted}/asked')
    for name, value in {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "a", "B_IS": "mixed"}.items():
        monkeypatch.setenv(name, value)
    plan = {"port": 20_000, "ranks": 1, "python": "python3", "run": RUN, "config": f"{RUN}/config.toml", "late_s": 77}
    return Allocation(plan, Runtime(None, None, ()))


@pytest.mark.parametrize(
    ("state", "usable"),
    [(state, True) for state in ("idle", "mixed", "allocated", "allocated@")]
    + [(state, False) for state in ("down", "draining", "inval", "idle~", "idle%", "mixed!", "idle#", "allocated*")],
)
def test_a_node_that_takes_no_step_is_not_a_living_one(
    allocation: Allocation, monkeypatch: pytest.MonkeyPatch, state: str, usable: bool
) -> None:
    monkeypatch.setenv("B_IS", state)
    assert allocation.healthy_nodes() == (["a", "b"] if usable else ["a"])


def test_task_of_an_array_looks_at_itself_alone(
    allocation: Allocation, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    plant(planted, "squeue", f'echo "$*" >> {planted}/asked; echo a,b')
    assert allocation.healthy_nodes()
    assert "--jobs=7_2 " in (planted / "asked").read_text()


def test_ranks_meet_where_slurm_reaches_the_first_node(allocation: Allocation, planted: Path) -> None:
    assert allocation.run_launch(1, allocation.healthy_nodes(), lambda: False) == 0
    asked = (planted / "asked").read_text()
    assert "--master 127.0.0.1:20002 --roster a,b" in asked
    assert "--wait=77 " in asked


def test_idle_nodes_of_the_partition_are_free_unless_others_wait(
    allocation: Allocation, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_PARTITION", "train")
    plant(
        planted,
        "sinfo",
        'case "$*" in *states=idle*) echo "c idle"; echo "d idle~";; *) echo "b mixed 10.0.0.2";; esac',
    )
    plant(planted, "squeue", 'case "$*" in *PENDING*) echo "$WAITING";; *) echo a,b;; esac')
    assert allocation.extra_nodes(["a"]) == ExtraNodes(("b",), ("c",))
    monkeypatch.setenv("WAITING", "8")
    assert allocation.extra_nodes(["a"]) == ExtraNodes(("b",))


def test_requeue_is_tried_again_while_slurm_does_not_answer(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_executor, "AGAIN_S", (0.0,))
    monkeypatch.setattr(slurm_executor.signal, "signal", lambda *_: None)
    plant(planted, "scontrol", f'echo "$*" >> {planted}/asked; [ "$(/bin/grep -c requeue {planted}/asked)" = 2 ]')
    assert slurm_executor.requeue(["b"]) == 0
    assert (planted / "asked").read_text().splitlines() == ["requeue 7"] * 2 + ["update JobId=7 ExcNodeList=b"]
    assert slurm_executor.requeue(()) == slurm_executor.PEERS


@pytest.mark.parametrize("signalled", [False, True])
@pytest.mark.parametrize(
    ("state", "start", "nodes", "requeued"),
    [
        ("RUNNING Reason=None", 1, "b,c", True),
        ("RUNNING Reason=None", 1, "a,b", False),
        ("RUNNING Reason=None", 2, "b,c", False),
        ("RUNNING Reason=None", 1, "unreadable", False),
        ("COMPLETING Reason=JobLaunchFailure", 1, "b,c", True),
        ("COMPLETING Reason=JobLaunchFailure", 2, "b,c", False),
        ("COMPLETING Reason=NonZeroExitCode", 1, "b,c", False),
        ("COMPLETING Reason=None", 1, "b,c", False),
        ("PENDING Reason=BeginTime", 1, "", False),
        ("PENDING Reason=JobLaunchFailure", 1, "(null)", False),
    ],
)
def test_watch_requeues_a_job_that_has_lost_its_host(
    planted: Path, signalled: bool, state: str, start: int, nodes: str, requeued: bool
) -> None:
    """Not one that a person has cancelled, that has ended, or that has started again."""
    once = f"[ ! -e {planted}/slept ] && : > {planted}/slept"
    plant(planted, "sleep", "kill -TERM $PPID; exit 1" if signalled else once)
    shown = f"JobId=7 JobState={state} Restarts={start} ReqNodeList=(null) NodeList={nodes} BatchHost=a"
    names = '[ "$3" != unreadable ] && echo "$3" | /usr/bin/tr , "\\n"'
    answers = f"--oneliner) echo '{shown}';; show) {names};; *) echo \"$*\" >> {planted}/asked;;"
    plant(planted, "scontrol", f'case "$1" in {answers} esac')
    subprocess.run(["/bin/sh", "-c", slurm_executor.WATCH, "lustrain-watch", "a", "7", "1"], check=False)
    asked = planted / "asked"
    assert (asked.read_text().splitlines() if asked.exists() else []) == ["requeue 7"] * requeued


def test_excluded_nodes_are_set_once_slurm_takes_changes(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm refuses to change a job that it requeues just now."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_executor, "EXCLUDE_AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(slurm_executor.signal, "signal", lambda *_: None)
    script = f'echo "$*" >> {planted}/asked; [ "$1" = requeue ] || [ "$(/bin/grep -c update {planted}/asked)" = 3 ]'
    plant(planted, "scontrol", script)
    assert slurm_executor.requeue(["b"]) == 0
    assert (planted / "asked").read_text().splitlines() == ["requeue 7"] + ["update JobId=7 ExcNodeList=b"] * 3


@pytest.mark.parametrize(("min_nodes", "excluded"), [(1, ["b"]), (2, [])])
def test_job_excludes_no_node_that_it_could_not_start_without(
    allocation: Allocation, planted: Path, monkeypatch: pytest.MonkeyPatch, min_nodes: int, excluded: list[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_PARTITION", "train")
    plant(planted, "sinfo", "echo a; echo b; echo c")
    allocation._tried = {"a": True, "c": False}
    assert list(allocation.excludable(["b"], min_nodes)) == excluded


@pytest.mark.parametrize(
    ("over", "at_term", "code"),
    [
        # srun kills on SIGTERM what still runs on a node that is lost to the others only, and ends once that is done.
        (True, "exit 137", 137),
        # Of a node that is gone it gets no answer.
        (True, "", 1),
        (False, "exit 137", 0),
        # The Lustrain on the nodes does not know the question: it is asked once.
        (None, "exit 137", 0),
    ],
)
def test_step_that_waits_for_lost_nodes_alone_is_given_up(
    allocation: Allocation,
    planted: Path,
    monkeypatch: pytest.MonkeyPatch,
    over: bool | None,
    at_term: str,
    code: int,
) -> None:
    """The run is asked for what its launchers reported once that of this host has ended, and not before."""
    monkeypatch.setattr(slurm_executor, "POLL_S", 0.05)
    monkeypatch.setattr(slurm_executor, "KILL_S", 60.0 if at_term else 0.01)
    monkeypatch.setattr(slurm_executor, "LOOK_S", 0.01)
    launcher, step, answered = f"{planted}/python3", f"{planted}/step", planted / "answered"
    allocation._plan = {**allocation._plan, "python": launcher}
    # Of a script /proc would name the interpreter first.
    (planted / "python3").symlink_to(sys.executable)
    (planted / "trainer/node").mkdir(parents=True)
    wait = (
        f"import os, time\nopen({step!r}, 'w').close()\nwhile not os.path.exists({step + '.go'!r}): time.sleep(0.01)\n"
    )
    (planted / "trainer/node/launcher.py").write_text(wait)
    words = f'while [ "$1" != {launcher} ]; do shift; done; cd {planted} && PYTHONPATH={planted} "$@"'
    # The others end some time after the run was asked for them; lost ones do not.
    others = f"while [ ! -e {answered} ]; do /bin/sleep 0.01; done; /bin/sleep 0.5"
    waits = "while :; do /bin/sleep 0.01; done" if over else others
    plant(planted, "srun", f"trap '{at_term}' TERM; {words}; {waits}")
    asked: list[int] = []

    def call(self: CommandJournal, action: str, argument: dict[str, int]) -> dict[str, bool]:
        assert action == "over"
        assert (planted / "step.go").exists(), "its own launcher still runs"
        asked.append(argument["attempt"])
        answered.touch()
        if over is None:
            raise TemporarilyUnavailable("ended with 2")
        return {"over": over}

    def should_end() -> bool:
        # Twice, so that the launcher was seen.
        looks.append(Path(step).exists())
        if looks.count(True) == 3:
            Path(f"{step}.go").touch()
        return False

    looks: list[bool] = []
    monkeypatch.setattr(CommandJournal, "_call", call)
    assert allocation.run_launch(1, allocation.healthy_nodes(), should_end) == code
    assert asked == [1] if over is None else {*asked} == {1}


def test_ranks_that_make_way_for_more_get_the_signal_to_save(
    allocation: Allocation, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_executor, "POLL_S", 0.05)
    monkeypatch.setenv("B_IS", "down")
    assert allocation.healthy_nodes() == ["a"]
    plant(planted, "srun", f"trap 'exit 85' USR1; : > {planted}/ready; while :; do /bin/sleep 0.05; done")
    assert allocation.run_launch(1, ["a"], (planted / "ready").exists) == 85
