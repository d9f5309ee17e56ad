"""Starts a run on any backend: dry run, or check → register → submit → record; records are put back where it was refused."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from launch import runs
from launch.backends import ArrayBackend, Backend, LaunchPlan, Submission
from launch.request import RunRequest
from lustrain.problem import UNREACHABLE, UserError
from lustrain.progress import Progress
from trainer.errors import EXIT_REQUEUE
from trainer.storage import open_store


def dry_run(request: RunRequest, plan: LaunchPlan) -> tuple[list[str], dict[str, Any]]:
    """Return what a start would write and run, as lines and for programs."""
    return dry_array(request.run, [request], plan)


def dry_array(folder: str, requests: Sequence[RunRequest], plan: LaunchPlan) -> tuple[list[str], dict[str, Any]]:
    """Return the same for runs that start as one job, whose files lie in `folder`."""
    files = {request.config_uri: request.config for request in requests}
    files |= {f"{folder}/{key}": text for key, text in plan.files.items()}
    lines = [line for uri, text in files.items() for line in (f"{uri}:", text)]
    return [*lines, "command:", shlex.join(plan.command)], {"files": files, "commands": [list(plan.command)]}


def submit(
    request: RunRequest,
    backend: Backend,
    folder: Path,
    environ: Mapping[str, str],
    *,
    resume: bool,
    output: IO[Any] | None = None,
) -> Submission:
    """Start the run. UserError; the run is then as it was before, unless the scheduler may have taken the job."""
    plan = backend.plan(request, folder, environ)
    backend.check(request, plan, folder, resume=resume)
    registered = runs.register_run(request, resume=resume, files=plan.files)
    try:
        submission = backend.submit(request, plan, folder, registered.store, output)
    except UserError as error:
        if error.exit_code != UNREACHABLE:
            registered.put_back()
        raise
    if submission.job is not None:
        runs.save_job(registered.store, request.backend, submission.job)
    elif submission.code == EXIT_REQUEUE:
        submission = replace(submission, lines=(*submission.lines, "next: the same fab train with --resume"))
    return submission


def submit_array(
    requests: Mapping[int, RunRequest],
    resumed: Set[int],
    backend: ArrayBackend,
    plan: LaunchPlan,
    sweep: str,
    folder: Path,
) -> list[Submission]:
    """Start runs of a sweep, by their index in it, as tasks of one job; those of `resumed` go on. UserError, as `submit` for
    all of them."""
    backend.check_array(next(iter(requests.values())), plan, folder)
    store = open_store(sweep, name="run.uri")
    earlier = runs.read_objects(store, plan.files)
    for key, text in plan.files.items():
        store.put(key, text.encode())
    registered: dict[int, runs.Registration] = {}
    try:
        with Progress("runs", len(requests), "runs", brief=True) as progress:
            for index, request in requests.items():
                registered[index] = runs.register_run(request, resume=index in resumed, files={})
                # Where the answer to the submission is lost, the task is still known by its index.
                job = registered[index].earlier_job(request.backend) | {"task": index}
                runs.save_job(registered[index].store, request.backend, job)
                progress.advance()
        submissions = backend.submit_array(requests, plan, sweep, folder)
    except UserError as error:
        if error.exit_code != UNREACHABLE:
            for registration in registered.values():
                registration.put_back()
            runs.restore(store, earlier)
        raise
    for request, registration, submission in zip(requests.values(), registered.values(), submissions, strict=True):
        runs.save_job(registration.store, request.backend, submission.job or {})
    return submissions
