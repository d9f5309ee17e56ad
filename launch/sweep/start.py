"""Starts the points of a sweep: on this machine and over SSH in turn, with a scheduler as jobs of their own."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from launch.backends import Backend, Submission
from launch.request import RunRequest
from launch.runs import SUPERVISED_BY_CALLER, read_record
from launch.submit import submit
from launch.sweep.grid import shown
from launch.sweep.plan import SweepPlan
from launch.sweep.record import Sweep, register_sweep, unregister_sweep
from launch.sweep.status import DONE, ENDED_EARLY, NOT_STARTED, UNFINISHED, read_outcomes
from lustrain.problem import UserError, problem
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
    result = SweepStart(register_sweep(plan))
    in_turn = plan.requests[0].backend in SUPERVISED_BY_CALLER
    try:
        outcomes = read_outcomes(result.sweep)
        (_train_in_turn if in_turn else _submit_jobs)(plan, outcomes, options, result)
    except UserError as error:
        if not result.started:
            unregister_sweep(result.sweep)
            raise
        result.error = error
    return result


def _train_in_turn(plan: SweepPlan, outcomes: list[str], options: StartOptions, result: SweepStart) -> None:
    for number, (request, outcome) in enumerate(zip(plan.requests, outcomes, strict=True), 1):
        if outcome == ENDED_EARLY and not options.resume:
            result.ended_early.append(request.run)
        elif outcome != DONE:
            if outcome == UNFINISHED and not options.resume:
                _refuse_on_another_machine(request)
            options.log(f"point {number} of {len(plan.points)}: {shown(plan.points[number - 1].values)}")
            with _signal_handlers_kept():
                submission = _submit(request, options, resume=outcome != NOT_STARTED)
            result.started.append(request.run)
            if submission.code == EXIT_REQUEUE and not journal.stopped(open_store(request.run)):
                result.interrupted = True
                return
            if submission.code != EXIT_DONE:
                result.ended_early.append(request.run)


def _submit_jobs(plan: SweepPlan, outcomes: list[str], options: StartOptions, result: SweepStart) -> None:
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
