"""`fab train`, `sweep`, `sweep-status`, `status`, `report`, `logs`, `stop`.

Imports of what a task does stand in it: every `fab` loads this file.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.flags import LogsFlags, ReportFlags, StatusFlags, StopFlags, SweepFlags, SweepStatusFlags, TrainFlags
from lustrain.problem import DONE, FAILED, UserError, problem
from lustrain.progress import print_line
from lustrain.task import TaskResult, task

if TYPE_CHECKING:
    from launch.backends import Backend
    from launch.sweep.plan import SearchPlan, SweepPlan
    from trainer.storage import ObjectStore


@task("train")
def train(flags: TrainFlags, context: Any) -> TaskResult:
    """Start a run, and start it again after every interruption until it is done. Exit code: the trainer's (docs/launch.md)."""
    from launch import backends
    from launch.request import resolve_request
    from launch.submit import dry_run, submit
    from lustrain import deployed
    from trainer import config

    cluster = deployed.cluster(flags.cluster, flags.stack)
    settings = config.load(Path(flags.config), flags.set)
    every, folder = backends.load_all(), Path.cwd()
    request = resolve_request(flags, settings, cluster, every, folder, _image(flags.image))
    backend = every[request.backend]
    if flags.dry or context.config.run.dry:
        return TaskResult(*dry_run(request, backend.plan(request, folder, os.environ)))
    # With --json standard output is one JSON value, so ranks on this machine print to standard error.
    output = sys.stderr if flags.json else None
    submission = submit(request, backend, folder, os.environ, resume=flags.resume, output=output)
    return TaskResult(submission.lines, submission.data, submission.code)


@task("sweep")
def sweep(flags: SweepFlags, context: Any) -> TaskResult:
    """Train one run for each combination of values, or those that a search draws; the same command again goes on."""
    from launch import backends
    from launch.sweep import status as reading
    from launch.sweep.plan import SearchPlan, plan_search, plan_sweep
    from launch.sweep.start import StartOptions, start_search, start_sweep
    from lustrain import deployed
    from lustrain.flags import number
    from trainer.errors import EXIT_REQUEUE

    at_once = None if flags.at_once is None else int(number("--at-once", flags.at_once, 1, 10_000))
    cluster = deployed.cluster(flags.cluster, flags.stack)
    every, folder = backends.load_all(), Path.cwd()
    plan = (plan_sweep if flags.search is None else plan_search)(flags, cluster, every, folder, _image(flags.image))
    name = plan.backend
    in_turn = isinstance(plan, SearchPlan) or plan.requests[0].supervised_by_caller
    if at_once is not None and in_turn:
        why = f"only valid with a scheduler: on {name} the points are trained in turn"
        raise UserError(problem("--at-once", at_once, why, fix="leave it out"))
    if flags.detach and in_turn:
        why = f"on {name} the points of a sweep are trained in turn by this fab sweep"
        raise UserError(problem("--detach", True, why, fix="leave it out, or start fab under tmux or systemd-run"))
    if flags.dry or context.config.run.dry:
        return _dry_search(plan) if isinstance(plan, SearchPlan) else _dry_sweep(plan, every[name], folder, at_once)
    output = sys.stderr if flags.json else None
    options = StartOptions(every[name], folder, flags.resume, at_once, output, print_line)
    result = start_search(plan, options) if isinstance(plan, SearchPlan) else start_sweep(plan, options)
    state = reading.read(result.sweep)
    lines = reading.lines(state)
    lines += [f"ended before its last step: {run}; next: fab status {run}" for run in result.ended_early]
    if result.ended_early:
        lines.append("next: the same command with --resume starts them again")
    if result.waiting:
        lines.append(f"{result.waiting} points wait for others to end; next: the same command again submits them")
    if result.interrupted:
        lines.append("interrupted; next: the same command again goes on")
    lines.append(f"next: fab sweep-status {plan.uri}")
    data = state | {"ended_early": result.ended_early, "waiting": result.waiting, "interrupted": result.interrupted}
    if result.error is not None:
        return TaskResult(lines, data, result.error.exit_code, result.error.problems)
    return TaskResult(lines, data, EXIT_REQUEUE if result.interrupted else FAILED if result.ended_early else DONE)


def _dry_sweep(plan: SweepPlan, backend: Backend, folder: Path, at_once: int | None) -> TaskResult:
    from launch.backends import ArrayBackend
    from launch.submit import dry_array, dry_run
    from launch.sweep.grid import shown

    lines: list[str] = []
    points: list[dict[str, Any]] = []
    array = None
    if isinstance(backend, ArrayBackend) and plan.requests[1:]:
        array = backend.plan_array(dict(enumerate(plan.requests)), plan.uri, folder, os.environ, at_once)
    for point, request in zip(plan.points, plan.requests, strict=True):
        lines.append(f"{request.run}: {shown(point.values)}")
        data: dict[str, Any] = {}
        if array is None:
            run_lines, data = dry_run(request, backend.plan(request, folder, os.environ))
            lines += run_lines
        points.append({"name": point.name, "run": request.run, "values": dict(point.values), **data})
    data = {}
    if array is not None:
        array_lines, data = dry_array(plan.uri, plan.requests, array)
        lines += array_lines
    return TaskResult(lines, {"sweep": plan.uri, "points": points, **data})


def _dry_search(plan: SearchPlan) -> TaskResult:
    from launch.sweep.grid import shown
    from launch.sweep.search import draw_values

    first = draw_values(plan.space, plan.seed, ())
    lines = [f"{plan.uri}: up to {plan.trials} points from {shown(plan.texts)}", f"the first: {shown(first)}"]
    return TaskResult(lines, {"sweep": plan.uri, "trials": plan.trials, "space": dict(plan.texts), "first": first})


@task("sweep-status")
def sweep_status(flags: SweepStatusFlags) -> TaskResult:
    """Show the points of a sweep: state, step and validation loss, the lowest one first."""
    from launch.request import uri_of
    from launch.sweep import status as reading
    from launch.sweep.record import load_sweep
    from lustrain import deployed
    from trainer.storage import open_store

    uri = uri_of(flags.sweep, deployed.cluster(flags.cluster, flags.stack), Path.cwd())
    recorded = load_sweep(open_store(uri, create=False, name="SWEEP"))
    state = reading.read(recorded)
    try:
        state = reading.with_held_jobs(state, reading.read_held_jobs(recorded, state))
    except UserError as error:
        print_line(str(error))
    return TaskResult(reading.lines(state), state)


def _image(name: str | None) -> tuple[str, str]:
    """Return an image by digest and what it is built for; empty where there is none, which not every backend needs."""
    from launch.image import DEFAULT
    from lustrain import image_file

    name = name or DEFAULT

    if "@" in name:
        return name, ""
    if not Path(name).exists():
        return "", ""
    record = image_file.read(Path(name))
    return record.deployable, record.target


@task("status")
def status(flags: StatusFlags) -> TaskResult:
    """Show a run's state, step, loss, speed, checkpoints, launches, and whether a scheduler holds its job."""
    from launch import status as reading

    state = reading.read_with_backend(_open(flags), print_line)
    return TaskResult(reading.lines(state), state)


@task("report")
def report(flags: ReportFlags) -> TaskResult:
    """Write one page about a run: its state, its launches, where its time went, and a plot."""
    from launch import report as reporting

    lines, data = reporting.make(_open(flags), Path(flags.output), flags.prometheus)
    return TaskResult([*lines, "", f"written: {flags.output}"], data)


@task("logs")
def logs(flags: LogsFlags) -> TaskResult:
    """Print what a run's ranks have printed, of all its launches or of one."""
    from launch import logs as reading
    from launch import runs
    from lustrain.flags import number
    from lustrain.process import drop_output
    from trainer.run.journal import REQUEST

    follow = flags.follow or flags.f
    if flags.json and follow:
        raise UserError("--json: only valid without --follow; fix: leave one of them out")
    rank = None if flags.rank is None else int(number("--rank", flags.rank, 0, 1_000_000))
    launch = None if flags.launch is None else int(number("--launch", flags.launch, 1, 1_000_000))
    store = _open(flags)
    request = runs.read_record(store, REQUEST)
    entries = reading.read(store, request, rank=rank, launch=launch, follow=follow)
    printed = False
    if flags.json:
        data = {"run": store.uri, "lines": [asdict(entry) for entry in entries]}
        if not data["lines"]:
            reading.check_part(store, request, rank, launch)
        return TaskResult((), data)
    try:
        for entry in entries:
            print(entry.shown(), flush=follow)
            printed = True
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output(sys.stdout.fileno())
    if not printed:
        reading.check_part(store, request, rank, launch)
        parts = [f"rank {rank}"] * (rank is not None) + [f"launch {launch}"] * (launch is not None)
        print_line(f"{' in '.join(parts) or store.uri} has printed nothing")
    return TaskResult(())


@task("stop")
def stop(flags: StopFlags) -> TaskResult:
    """Have a run save and exit; it is not started again until `fab train --resume`."""
    from launch import backends, runs
    from trainer.run.journal import REQUEST, STOP
    from trainer.storage import open_store

    store = _open(flags)
    body = json.dumps({"by": os.environ.get("USER", "")}).encode()
    store.put(STOP, body)
    request = runs.read_record(store, REQUEST) or {}
    own_uri = str(request.get("stop_uri") or "")
    refused: UserError | None = None
    if own_uri and own_uri != f"{request.get('run')}/{STOP}":
        folder, _, name = own_uri.rpartition("/")
        try:
            open_store(folder, name="interrupt.stop_uri").put(name, body)
        except UserError as error:
            if not flags.now:
                raise
            # Its job is cancelled all the same: its ranks would go on.
            refused = error
    lines = [f"{store.uri}: stop requested: the run will save and exit"]
    cancelled: list[str] = []
    if flags.now:
        name = str(request.get("on"))
        backend = backends.load(name)
        if backend is None:
            lines.append(f"nothing is cancelled: there is no backend {name} here")
        else:
            try:
                cancelled = backend.cancel(runs.registered_uri(request, store), runs.read_jobs(store).get(name))
            except UserError as error:
                if refused:
                    raise UserError([*refused.problems, *error.problems], error.exit_code) from error
                raise
            lines.append(f"cancelled: {', '.join(cancelled)}" if cancelled else "nothing is cancelled: it has no job")
    lines.append(f"next: fab status {store.uri}")
    data = {"run": store.uri, "now": flags.now, "cancelled": cancelled}
    return TaskResult(lines, data, refused.exit_code, refused.problems) if refused else TaskResult(lines, data)


def _open(flags: StatusFlags | ReportFlags | LogsFlags | StopFlags) -> ObjectStore:
    from launch.request import uri_of
    from launch.runs import open_existing_run
    from lustrain import deployed

    return open_existing_run(uri_of(flags.run, deployed.cluster(flags.cluster, flags.stack), Path.cwd()))


TASKS = (train, sweep, sweep_status, status, report, logs, stop)
