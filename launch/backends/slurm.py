"""Slurm as a backend: a run is one job, whose batch script carries its supervisor and needs the standard library alone."""

from __future__ import annotations

import pprint
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from launch import runs
from launch.backends import HeldJob, LaunchPlan, LogLine, Submission
from launch.backends.command import error_text, run
from launch.backends.log_file import log_file, read_log_file
from launch.backends.ranks import SPARE_S, first_port, late_s, ranks_environment
from launch.container import Container
from launch.flags import TrainFlags
from launch.image import container_of
from launch.request import RunRequest, Target
from lustrain.cluster import Cluster
from lustrain.problem import FAILED, UNREACHABLE, USAGE, Problem, UserError, problem
from trainer.storage import ObjectStore, open_store

SCRIPT = "launch/batch.py"
ARRAY_SCRIPT = "array.py"
MODULES = (
    "launch.supervisor.policy",
    "launch.supervisor.executor",
    "launch.supervisor.loop",
    "launch.container",
    "launch.backends.slurm_executor",
)
"""What the batch script carries, in the order in which they import each other."""
FORBIDDEN_CHARACTER = re.compile(r"[^!-~]|[\"'#%\\]")
"""In a word of sbatch's options: white space, quotes, and the patterns of file names."""
PING = "scontrol ping; is slurmctld up?"
ENDED_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
"""https://slurm.schedmd.com/sacct.html#SECTION_JOB-STATE-CODES"""
_PARSABLE = re.compile(r"([0-9]+)(;\S+)?")
_TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]+(:[0-9]+)?|[0-9]+-[0-9]+(:[0-9]+){0,2}")
"""https://slurm.schedmd.com/sbatch.html#OPT_time"""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*")
_HELD = re.compile("held|hold", re.IGNORECASE)
"""In the reason of a job that waits for a person: JobHeldUser, JobHeldAdmin, JobHoldMaxRequeue
(https://slurm.schedmd.com/job_reason_codes.html), "launch failed requeued held"."""
_LAUNCH_FAILED = "launch failed"
_HOST_LOST = "its script is lost with node "
_QUEUED = "%T|%r|%N|%B|%k"
"""After the number: state, reason, nodes, batch host, comment (https://slurm.schedmd.com/squeue.html#OPT_format)."""


@dataclass(frozen=True)
class SlurmOptions:
    """What a job requests; None and 0 request nothing."""

    partition: str | None
    account: str | None
    qos: str | None
    time: str | None
    gpus: int
    """GPUs of each node."""
    efa: bool
    container: Container | None
    """What ranks run in; None on the nodes themselves."""


@dataclass(frozen=True)
class Job:
    """A job that waits or runs."""

    number: int | str
    """ARRAY_INDEX of a task of an array."""
    held: str = ""
    """Why it does not go on until a person acts; empty where it does."""

    @property
    def release(self) -> str:
        """What lets it go on."""
        word = "requeue" if self.held.startswith(_HOST_LOST) else "release"
        words = f"scontrol {word} {self.number}, as its owner or an operator of Slurm"
        if _LAUNCH_FAILED not in self.held:
            return words
        node = "a node that `sinfo -R` shows with Duplicate jobid"
        return f"{words}; {node} takes jobs again after scontrol update NodeName=NODE State=RESUME"

    def as_held(self) -> HeldJob:
        return HeldJob(str(self.number), self.held, self.release)


class SlurmBackend:
    own_flags = ("account", "grow_after", "image", "partition", "qos", "time")
    uses_groups = True
    scheduler_can_replace_nodes = True
    supervised_by_caller = False
    supervises_ranges = False

    def serves(self, cluster: Cluster) -> bool:
        return cluster.backend == "hyperpod-slurm" or cluster.slurm is not None

    def default_ranks(self, target: Target, problems: list[Problem]) -> int:
        if target.cluster is None:
            why = "without a Cluster the GPUs of a node are not known"
            problems.append(problem("--nproc", None, why, fix="give the ranks of a node, or --cluster"))
        return target.group.gpus if target.group else 0

    def options(self, flags: TrainFlags, target: Target, problems: list[Problem]) -> SlurmOptions:
        """Return the job's options; flags come before the Cluster."""
        if flags.time is not None and not _TIME.fullmatch(flags.time):
            allowed = "minutes, or like 1-12:00:00"
            problems.append(problem("--time", flags.time, "is not a time of Slurm", allowed=allowed))
        group, defaults = target.group, target.cluster.slurm if target.cluster else None
        options = SlurmOptions(
            flags.partition or (group.partition if group else None),
            flags.account or (defaults.account if defaults else None),
            flags.qos or (defaults.qos if defaults else None),
            flags.time,
            group.gpus if group else 0,
            bool(group and group.efa),
            container_of(flags, target, problems),
        )
        names = {"--partition": options.partition, "--account": options.account, "--qos": options.qos}
        for path, name in names.items():
            if name is not None and not _NAME.fullmatch(name):
                problems.append(problem(path, name, "is not a name of Slurm", allowed="letters, digits, _ . , -"))
        if match := FORBIDDEN_CHARACTER.search(target.run):
            problems.append(problem("run.uri", target.run, f"holds {match[0]!r}, which an option of sbatch cannot"))
        return options

    def plan(self, request: RunRequest, folder: Path, environ: Mapping[str, str]) -> LaunchPlan:
        log = log_file(request, folder)
        _check_log(log, folder)
        text = script(request, log, _environment(request.options, environ))
        return LaunchPlan(("sbatch", "--parsable", f"--chdir={folder}"), {SCRIPT: text})

    def check(self, request: RunRequest, plan: LaunchPlan, folder: Path, *, resume: bool) -> None:
        _check_script(request.options, plan.files[SCRIPT], folder)
        self.check_queue(request, resume=resume)

    def check_queue(self, request: RunRequest, *, resume: bool) -> None:
        # Also without --resume: a caller that lost the answer of sbatch may begin anew.
        if waiting := jobs_of(request.run):
            job = waiting[0]
            stop = f"fab stop {request.run} --now"
            why, fix = f"job {job.number} of Slurm still waits or runs for it", f"{stop}, or let it go on"
            if job.held:
                why, fix = f"job {job.number} of Slurm is held ({job.held})", f"{job.release}; or {stop}"
            raise UserError(problem("--resume" if resume else "run.uri", request.run, why, fix=fix))

    def plan_array(
        self,
        requests: Mapping[int, RunRequest],
        sweep: str,
        folder: Path,
        environ: Mapping[str, str],
        at_once: int | None,
    ) -> LaunchPlan | None:
        """Return the plan of one job array, whose tasks are the runs; None where they do not request the same."""
        log = array_log(sweep, folder)
        _check_log(log.replace("%A_%a", ""), folder)
        first = next(iter(requests.values()))
        if any(resource_options(request) != resource_options(first) for request in requests.values()):
            return None
        text = array_script(requests, sweep, log, _environment(first.options, environ), at_once)
        return LaunchPlan(("sbatch", "--parsable", f"--chdir={folder}"), {ARRAY_SCRIPT: text})

    def check_array(self, request: RunRequest, plan: LaunchPlan, folder: Path) -> None:
        _check_script(request.options, plan.files[ARRAY_SCRIPT], folder)

    def submit_array(
        self, requests: Mapping[int, RunRequest], plan: LaunchPlan, sweep: str, folder: Path
    ) -> list[Submission]:
        # Tasks of an earlier start may still run.
        earlier = [job.number for job in jobs(sweep, _name(sweep))]
        array = submit(plan.files[ARRAY_SCRIPT], folder, sweep, _name(sweep), earlier)
        log = array_log(sweep, folder).replace("%A", str(array))
        return [
            Submission(
                (f"{request.run}: job {array}_{task} of Slurm",),
                {},
                job={"job": f"{array}_{task}", "task": task, "log": log.replace("%a", str(task))},
            )
            for task, request in requests.items()
        ]

    def submit(
        self, request: RunRequest, plan: LaunchPlan, folder: Path, store: ObjectStore, output: IO[Any] | None
    ) -> Submission:
        number, log = submit(plan.files[SCRIPT], folder, request.run, request.name), log_file(request, folder)
        lines = (f"{request.run}: job {number} of Slurm", f"log: {log}", f"next: fab status {request.run}")
        data = {"run": request.run, "job": number, "log": log}
        return Submission(lines, data, job={"job": number, "log": log})

    def describe(self, job: Mapping[str, Any]) -> str:
        return f"job {job.get('job', 'without a known number')} of Slurm"

    def held_job(self, run: str) -> HeldJob | None:
        if shutil.which("squeue") is None:
            return None
        return next((job.as_held() for job in jobs_of(run) if job.held), None)

    def held_jobs(self, sweep: str, runs: Sequence[str]) -> dict[str, HeldJob]:
        """Return the held jobs and tasks of the sweep's runs: one look at the queue, however many they are."""
        if shutil.which("squeue") is None:
            return {}
        found: dict[str, HeldJob] = {}
        for queued in _queue(sweep, "--array", f"--format=%F_%K|{_QUEUED}"):
            array, _, task = queued.number.partition("_")
            if queued.comment == sweep and task.isdecimal() and int(task) < len(runs):
                run, job = runs[int(task)], Job(queued.number, queued.held())
            elif queued.comment in runs:
                run, job = queued.comment, Job(array, queued.held())
            else:
                continue
            if job.held:
                found[run] = job.as_held()
        return found

    def ended_job(self, run: str, job: Mapping[str, Any]) -> str | None:
        number = job.get("job")
        # The newest record of a job that was requeued may be that of its former end.
        return None if number is None or not shutil.which("sacct") or jobs_of(run) else ended(number)

    def cancel(self, run: str, job: Mapping[str, Any] | None) -> list[str]:
        queued = jobs_of(run)
        for waiting in queued:
            cancel(waiting.number)
        return [f"job {waiting.number} of Slurm" for waiting in queued]

    def read_log(
        self, run: str, job: Mapping[str, Any] | None, launch: int | None, more: Callable[[], bool]
    ) -> Iterator[LogLine]:
        """Read the job's one output file, into which all of its steps write."""
        return read_log_file(run, job, more)


def _name(uri: str) -> str:
    return uri.rpartition("/")[2]


def _check_log(log: str, folder: Path) -> None:
    if match := FORBIDDEN_CHARACTER.search(log):
        raise UserError(problem("folder", str(folder), f"holds {match[0]!r}, which an option of sbatch cannot"))


def _environment(options: SlurmOptions, environ: Mapping[str, str]) -> dict[str, str]:
    # Modules of the node are not the image's.
    without = ("PYTHONPATH",) if options.container else ()
    return ranks_environment(environ, efa=options.efa, without=without)


def sbatch_options(request: RunRequest, log: str) -> list[str]:
    """Return the options of sbatch, one a line of the script."""
    return [*_named(request.name, request.run, log), *resource_options(request)]


def _named(name: str, uri: str, log: str) -> list[str]:
    """Return the options by which a job is found."""
    return [f"--job-name={name}", f"--comment={uri}", f"--output={log}"]


def resource_options(request: RunRequest) -> list[str]:
    """Return the options that say what the job gets, and how it ends."""
    options: SlurmOptions = request.options
    named = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
    }
    low = request.policy.min_nodes
    nodes = str(low) if low == request.nodes else f"{low}-{request.nodes}"
    return [
        "--open-mode=append",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        # --exclusive gives all processors of a node, this all its memory.
        "--mem=0",
        "--no-kill",
        "--requeue",
        # The caller's environment may hold secrets, and ranks after a requeue would get another one.
        "--export=NIL",
        f"--signal=B:USR1@{round(request.grace_s) + SPARE_S}",
        *([f"--gpus-per-node={options.gpus}"] if options.gpus else []),
        *(f"--{key}={value}" for key, value in named.items() if value),
    ]


def script_plan(request: RunRequest, log: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return the values that the script needs, as plain JSON data."""
    return {
        "run": request.run,
        "config": request.config_uri,
        "python": request.python or ("python3" if request.options.container else sys.executable),
        "ranks": request.policy.ranks_per_node,
        "port": first_port(request.run),
        "policy": asdict(request.policy),
        "max_wait_s": request.max_wait_s,
        "late_s": late_s(request),
        "environment": environment,
        "log": log,
        "container": asdict(request.options.container) if request.options.container else None,
    }


HEAD = """
import os
import sys
from types import ModuleType

if sys.version_info < (3, 9):
    sys.exit("lustrain: Python of this host is %d.%d; allowed: 3.9 or newer" % sys.version_info[:2])


def supervise(plan):
    # Each under its own name: their imports of each other need no file then.
    for name, text in SOURCES.items():
        module = sys.modules[name] = ModuleType(name)
        exec(compile(text, name.replace(".", "/") + ".py", "exec"), vars(module))
    sys.exit(module.main(plan))

"""


def script(request: RunRequest, log: str, environment: dict[str, str]) -> str:
    """Return the whole batch script of a run."""
    title = f"Starts the run {request.name} on the nodes of this job. Made by `fab train`; see docs/launch.md."
    return _whole(sbatch_options(request, log), title, script_plan(request, log, environment), "PLAN")


def array_script(
    requests: Mapping[int, RunRequest], sweep: str, log: str, environment: dict[str, str], at_once: int | None
) -> str:
    """Return the whole batch script of an array, whose tasks are the runs; at most `at_once` of them run at the same time."""
    tasks, throttle = ",".join(map(str, requests)), f"%{at_once}" if at_once else ""
    options = [*_named(_name(sweep), sweep, log), f"--array={tasks}{throttle}"]
    title = "Starts one run of a sweep on the nodes of this job. Made by `fab sweep`; see docs/launch.md."
    plans = {task: script_plan(request, log, environment) for task, request in requests.items()}
    task = 'PLAN[int(os.environ["SLURM_ARRAY_TASK_ID"])]'
    return _whole([*options, *resource_options(next(iter(requests.values())))], title, plans, task)


def array_log(sweep: str, folder: Path) -> str:
    """Return the pattern of the files into which the tasks of an array print: in a sweep that is a folder, else in that of the
    caller."""
    return f"{folder}/lustrain-{_name(sweep)}-%A_%a.log" if "://" in sweep else f"{sweep}/log-%A_%a"


def _whole(options: Sequence[str], title: str, values: Any, plan: str) -> str:
    """Return a batch script: HEAD, `values` as PLAN, MODULES as they are. `plan` is the expression of its own plan in PLAN."""
    root = Path(__file__).parents[2]
    files = {name: root.joinpath(*name.split(".")).with_suffix(".py") for name in MODULES}
    sources = [f"    {name!r}: r'''{file.read_text(encoding='utf-8')}'''," for name, file in files.items()]
    head = ["#!/usr/bin/env python3", *(f"#SBATCH {option}" for option in options), f'"""{title}"""', HEAD]
    shown = pprint.pformat(values, width=100, sort_dicts=False)
    return "\n".join([*head, f"PLAN = {shown}", "", "SOURCES = {", *sources, "}", f"supervise({plan})", ""])


def submit(text: str, folder: Path, uri: str, name: str, earlier: Collection[int | str] = ()) -> int:
    """Submit the script of the job with this comment and name; return its number, from the queue where sbatch prints none:
    that of the newest job but the `earlier` ones. UserError.
    """

    def queued() -> list[int]:
        return [int(job.number) for job in jobs(uri, name) if job.number not in earlier]

    try:
        printed = _sbatch(text, folder, "--parsable")
    except UserError as error:
        if error.exit_code != UNREACHABLE:
            raise
        try:
            numbers = queued()
        except UserError:
            numbers = []
        if numbers:
            return numbers[-1]
        fix = "once `scontrol ping` answers: the same command with --resume, which starts nothing beside that job"
        raise UserError(f"{error}; whether Slurm took the job is not known; fix: {fix}", UNREACHABLE) from None
    # A site may print a banner before or after it.
    matches = (_PARSABLE.fullmatch(line.strip()) for line in printed.splitlines())
    numbers = [int(match[1]) for match in matches if match] or queued()
    if not numbers:
        why = f"sbatch took the script and printed no number of a job: {' '.join(printed.split())[:200]!r}"
        raise UserError(f"{why}; fix: squeue --name={name}", UNREACHABLE)
    return numbers[-1]


def _sbatch(text: str, folder: Path, flag: str) -> str:
    output = run(["sbatch", flag, f"--chdir={folder}"], text, fix=PING)
    if output.code:
        why = error_text(output, ("error: ", "fatal: ", "allocation failure: "))
        why = re.sub("(sbatch: |allocation failure: |error: |fatal: )+", "", why)
        lost = re.search("Unable to contact|Connection refused|timed out|No route to host", output.errors)
        raise UserError(f"sbatch: {why}; fix: {_fix(output.errors)}", UNREACHABLE if lost else USAGE)
    return output.out


def _check_accounts(options: SlurmOptions) -> None:
    """Refuse an account or QOS that accounting does not know: a Slurm that enforces no limits takes any name. UserError."""
    if shutil.which("sacctmgr") is None:
        return
    for flag, kind, column, always, name in (
        ("--account", "account", "account", "root", options.account),
        ("--qos", "qos", "name", "normal", options.qos),
    ):
        if name is None:
            continue
        output = run(("sacctmgr", "--noheader", "--parsable2", "show", kind, f"format={column}"), fix=PING)
        known = {*output.out.lower().split()}
        # Without accounting, while slurmdbd is away, and where its PrivateData hides accounts, sbatch decides.
        if output.code == 0 and always in known and not {*name.lower().split(",")} <= known:
            fix = f"`sacctmgr show {kind}` lists them; an administrator adds one: sacctmgr add {kind} {name}"
            raise UserError(problem(flag, name, f"Slurm's accounting knows no such {kind}", fix=fix))


def _check_script(options: SlurmOptions, text: str, folder: Path) -> None:
    """Refuse what Slurm would refuse, or take and never run. UserError."""
    _require_sbatch()
    _check_accounts(options)
    _sbatch(text, folder, "--test-only")


def _require_sbatch() -> None:
    if shutil.which("sbatch") is None:
        fix = "run fab where Slurm's programs are: on the controller or a login node"
        raise UserError(problem("--on", "slurm", "there is no sbatch on this machine", fix=fix))


def jobs_of(run: str) -> list[Job]:
    """Return the jobs that wait or run for this run: its own, and its task of a sweep's array. UserError as `jobs`."""
    return [*jobs(run, _name(run)), *_array_tasks(run)]


def _array_tasks(run: str) -> list[Job]:
    """Return the tasks of the run's index in arrays of its sweep: also of one whose number was lost with sbatch's answer."""
    try:
        store = open_store(run, create=False, name="run.uri")
    except UserError:
        # It is not begun.
        return []
    record = runs.read_jobs(store).get("slurm") or {}
    if "task" not in record:
        return []
    sweep = run.rpartition("/")[0]
    # A pending array is one line without --array, whose tasks have no lines of their own.
    return [
        Job(queued.number, queued.held())
        for queued in _queue(run, "--array", f"--name={_name(sweep)}", f"--format=%F_%K|{_QUEUED}")
        if queued.comment == sweep and queued.number.endswith(f"_{record['task']}")
    ]


def jobs(run_uri: str, name: str) -> list[Job]:
    """Return the jobs that wait or run for this run, oldest first: those with its name and, as comment, itself.

    An array is one job. UserError (UNREACHABLE) where Slurm does not answer: then there may be some.
    """
    matching = {
        int(queued.number): queued
        for queued in _queue(run_uri, f"--name={name}", f"--format=%F|{_QUEUED}")
        if queued.comment == run_uri and queued.number.isdecimal()
    }
    return [Job(number, matching[number].held()) for number in sorted(matching)]


@dataclass(frozen=True)
class _Queued:
    """A line of squeue."""

    number: str
    state: str
    reason: str
    nodes: str
    batch_host: str
    comment: str

    def held(self) -> str:
        """Return why the job does not go on until a person acts; empty where it does.

        https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
        """
        waits = self.state == "PENDING" and _HELD.search(self.reason) is not None
        if waits or self.state in ("REQUEUE_HOLD", "SPECIAL_EXIT"):
            return self.reason
        # A job that holds its nodes when one is lost keeps them without its script too, unless one of them watched it.
        lost = self.state == "RUNNING" and self.batch_host and self.batch_host not in _node_names(self.nodes)
        return f"{_HOST_LOST}{self.batch_host}" if lost else ""


def _node_names(nodes: str) -> list[str]:
    """Return the names in a list as Slurm prints it. UserError."""
    if "[" not in nodes:
        return nodes.split(",")
    output = run(["scontrol", "show", "hostnames", nodes], fix=PING)
    if output.code:
        why = error_text(output, ("error: ", "fatal: "))
        raise UserError(f"scontrol show hostnames {nodes}: {why}; fix: {PING}", UNREACHABLE)
    return output.out.split()


def _queue(run_uri: str, *options: str) -> list[_Queued]:
    """Return what squeue lists by a format of a number and `_QUEUED`. UserError."""
    # Also of partitions that are hidden.
    output = run(["squeue", "--all", "--noheader", *options], fix=PING)
    if output.code:
        why = error_text(output, ("error: ", "fatal: "))
        raise UserError(
            f"squeue: {why}: whether a job waits or runs for {run_uri} is not known; fix: {PING}", UNREACHABLE
        )
    rows = (line.strip().split("|", 5) for line in output.out.splitlines())
    return [_Queued(*row) for row in rows if len(row) == 6]


def ended(job: int | str) -> str | None:
    """Return how the job ended by Slurm's accounting; None where it has not, or there is no accounting. UserError."""
    options = (
        "--allusers",
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={job}",
        "--format=state,exitcode,end",
    )
    output = run(["sacct", *options], fix=PING)
    if output.code:
        if "accounting storage is disabled" in output.errors:
            return None
        why = error_text(output, ("error: ", "fatal: "))
        raise UserError(f"sacct: {why}: how job {job} ended is not known; fix: is slurmdbd up?", UNREACHABLE)
    # A job that was requeued has its last record here.
    rows = [line.strip().split("|") for line in output.out.splitlines() if line.count("|") == 2]
    if not rows or rows[-1][0].partition(" ")[0] not in ENDED_STATES:
        return None
    state, code, end = rows[-1]
    return f"{state}, exit code {code}, {end}"


def cancel(job: int | str) -> None:
    """Have Slurm end the job: its ranks get SIGTERM and save if there is time. UserError."""
    output = run(["scancel", str(job)], fix=PING)
    if output.code:
        raise UserError(
            f"scancel {job}: {error_text(output, ('error: ', 'fatal: '))}; fix: run it on the controller", FAILED
        )


def _fix(error: str) -> str:
    known = {
        "contact": PING,
        "timed out": PING,
        "partition": "sinfo lists the partitions",
        "account": "sacctmgr show associations user=$USER lists your accounts",
        "qos": "sacctmgr show qos lists them",
        "node configuration": "ask for fewer nodes, or another partition",
    }
    return next((fix for word, fix in known.items() if word in error.lower()), "scontrol show partition")


BACKEND = SlurmBackend()
