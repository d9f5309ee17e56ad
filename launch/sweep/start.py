"""Starts the points of a sweep: here and over SSH in turn, on Slurm as one job array, on Kubernetes as a Job each."""

from __future__ import annotations

import math
import os
import platform
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from launch.backends import ArrayBackend, Backend, Submission
from launch.request import RunRequest
from launch.runs import read_record
from launch.submit import submit, submit_array
from launch.sweep.grid import Point, shown
from launch.sweep.plan import SearchPlan, SweepPlan
from launch.sweep.record import Sweep, add_point, register_search, register_sweep, unregister_sweep
from launch.sweep.search import DRAWS, Trial, draw_values
from launch.sweep.status import DONE, ENDED_EARLY, NOT_STARTED, UNFINISHED, read_outcomes, read_rows
from lustrain.problem import UserError, problem
from lustrain.progress import Progress
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.node.ranks import FORWARDED
from trainer.run import journal
from trainer.storage import open_store


@dataclass
class SweepStart:
    """What a start of a sweep has led to."""

    sweep: Sweep
    started: list[str] = field(default_factory=list)
    """Runs that this start has begun or gone on with."""
    ended_early: list[str] = field(default_factory=list)
    """Runs that ended before their last step, now or earlier, and are not started again without `resume`."""
    waiting: int = 0
    """Points that are not submitted yet because of `at_once`."""
    interrupted: bool = False
    """Whether a signal or the end of the capacity ended the run under way; the points after it are not begun."""
    error: UserError | None = None
    """Why a point could not be started, where earlier ones were; the points after it are not tried."""


@dataclass(frozen=True)
class StartOptions:
    """How points are started."""

    backend: Backend
    folder: Path
    resume: bool
    """Start also points that ended before their last step."""
    at_once: int | None
    """The most points with a job that has not ended; None for no bound."""
    output: IO[Any] | None
    """Where ranks on this machine print; None for standard output."""
    log: Callable[[str], None]


def start_sweep(plan: SweepPlan, options: StartOptions) -> SweepStart:
    """Start the points that are not done. UserError where none could be started; a new sweep is then not recorded."""

    def start(result: SweepStart) -> None:
        outcomes = read_outcomes(result.sweep)
        in_turn = plan.requests[0].supervised_by_caller
        (_train_in_turn if in_turn else _submit_jobs)(plan, outcomes, options, result)

    return _started(register_sweep(plan), start)


def start_search(plan: SearchPlan, options: StartOptions) -> SweepStart:
    """Train the points of a search that are not done, then draw new ones and train them. UserError as `start_sweep`."""
    return _started(register_search(plan), lambda result: _search(plan, options, result))


def _started(sweep: Sweep, start: Callable[[SweepStart], None]) -> SweepStart:
    result = SweepStart(sweep)
    try:
        start(result)
    except UserError as error:
        if not result.started:
            unregister_sweep(result.sweep)
            raise
        result.error = error
    return result


def _train_in_turn(plan: SweepPlan, outcomes: list[str], options: StartOptions, result: SweepStart) -> None:
    for number, (request, outcome) in enumerate(zip(plan.requests, outcomes, strict=True), 1):
        label = f"point {number} of {len(plan.points)}: {shown(plan.points[number - 1].values)}"
        _train_point(request, outcome, label, options, result)
        if result.interrupted:
            return


def _train_point(request: RunRequest, outcome: str, label: str, options: StartOptions, result: SweepStart) -> None:
    """Train a point that is not done to its end."""
    if outcome == ENDED_EARLY and not options.resume:
        result.ended_early.append(request.run)
    elif outcome != DONE:
        if outcome == UNFINISHED and not options.resume:
            _refuse_on_another_machine(request)
        options.log(label)
        with _signal_handlers_kept():
            submission = _submit(request, options, resume=outcome != NOT_STARTED)
        result.started.append(request.run)
        if submission.code == EXIT_REQUEUE and not journal.stopped(open_store(request.run)):
            result.interrupted = True
        elif submission.code != EXIT_DONE:
            result.ended_early.append(request.run)


def _search(plan: SearchPlan, options: StartOptions, result: SweepStart) -> None:
    for number, row in enumerate(read_rows(result.sweep), 1):
        point = result.sweep.points[number - 1]
        label = f"point {number} of {plan.trials}: {shown(point.values)}"
        _train_point(plan.request(point), row["outcome"], label, options, result)
        if result.interrupted:
            return
    trials = [trial_of(row) for row in read_rows(result.sweep)]
    while len(trials) < plan.trials:
        drawn = _draw_point(plan, trials, options.log)
        if drawn is None:
            options.log(f"the space is used up after {len(trials)} points")
            return
        point, request = drawn
        result.sweep = add_point(result.sweep, point)
        label = f"point {len(trials) + 1} of {plan.trials}: {shown(point.values)}"
        _train_point(request, NOT_STARTED, label, options, result)
        if result.interrupted:
            return
        trials += map(trial_of, read_rows(replace(result.sweep, points=(point,))))


def _draw_point(
    plan: SearchPlan, trials: Sequence[Trial], log: Callable[[str], None]
) -> tuple[Point, RunRequest] | None:
    """Return the next point with its request; None where all draws are values of a point that there is, or refused."""
    known = [dict(trial.values) for trial in trials]
    for draw in range(DRAWS):
        values = draw_values(plan.space, plan.seed, trials, draw)
        if values in known:
            continue
        known.append(values)
        try:
            return plan.point(values), plan.request(plan.point(values))
        except UserError as error:
            log(f"left out: {shown(values)}: {error.problems[0]}")
    return None


def trial_of(row: Mapping[str, Any]) -> Trial:
    """Return what a search learns from a point of `read_rows`."""
    loss = row["best_validation_loss"]
    return Trial(row["values"], None if row["outcome"] != DONE else math.inf if loss is None else loss)


def _submit_jobs(plan: SweepPlan, outcomes: list[str], options: StartOptions, result: SweepStart) -> None:
    if isinstance(options.backend, ArrayBackend) and _submit_array(plan, outcomes, options, options.backend, result):
        return
    unfinished = outcomes.count(UNFINISHED)
    for request, outcome in zip(plan.requests, outcomes, strict=True):
        if outcome == DONE or (outcome == UNFINISHED and not options.resume):
            continue
        if outcome == ENDED_EARLY and not options.resume:
            result.ended_early.append(request.run)
        elif outcome != UNFINISHED and options.at_once is not None and unfinished >= options.at_once:
            result.waiting += 1
        else:
            try:
                submission = _submit(request, options, resume=outcome != NOT_STARTED)
            except UserError as error:
                if outcome == UNFINISHED and _has_job(error):
                    continue
                raise
            result.started.append(request.run)
            unfinished += outcome != UNFINISHED
            for line in submission.lines[:1]:
                options.log(line)


def _submit_array(
    plan: SweepPlan, outcomes: list[str], options: StartOptions, backend: ArrayBackend, result: SweepStart
) -> bool:
    """Submit all points that are due as one job; False where each is to be a job of its own."""
    due: dict[int, RunRequest] = {}
    with Progress("queue", len(plan.requests), "runs", brief=True) as progress:
        for index, (request, outcome) in enumerate(zip(plan.requests, outcomes, strict=True)):
            progress.advance()
            if outcome == NOT_STARTED or (options.resume and outcome != DONE):
                try:
                    backend.check_queue(request, resume=outcome != NOT_STARTED)
                except UserError as error:
                    if outcome == UNFINISHED and _has_job(error):
                        continue
                    raise
                due[index] = request
    if len(due) < 2:
        return False
    array = backend.plan_array(due, plan.uri, options.folder, os.environ, options.at_once)
    if array is None:
        return False
    resumed = {index for index in due if outcomes[index] != NOT_STARTED}
    submissions = submit_array(due, resumed, backend, array, plan.uri, options.folder)
    result.started += [request.run for request in due.values()]
    for submission in submissions:
        options.log(submission.lines[0])
    if not options.resume:
        ended = zip(plan.requests, outcomes, strict=True)
        result.ended_early += [request.run for request, outcome in ended if outcome == ENDED_EARLY]
    return True


def _refuse_on_another_machine(request: RunRequest) -> None:
    """Refuse to take over a run whose process on another machine may live; its launches are closed where that has ended."""
    store = open_store(request.run)
    host = str((read_record(store, journal.REQUEST) or {}).get("host"))
    launches = journal.read(store)
    if host != platform.node() and launches and "ended" not in launches[-1]:
        fix = "let it go on there; or, where that process is gone, take the run over: --resume"
        raise UserError(problem("run.uri", request.run, f"may still be trained from {host}", fix=fix))


def _has_job(error: UserError) -> bool:
    """Whether a backend refused to resume a run because a job waits or runs for it."""
    return all(line.path == "--resume" for line in error.problems)


def _submit(request: RunRequest, options: StartOptions, *, resume: bool) -> Submission:
    return submit(request, options.backend, options.folder, os.environ, resume=resume, output=options.output)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Take back the handlers of an executor that has ended: a signal between two runs has to end the sweep."""
    handlers = {number: signal.getsignal(number) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
