"""Starts a run on any backend: dry run, or check → register → submit → record, and unregister where it was refused."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from launch import runs
from launch.backends import Backend, LaunchPlan, Submission
from launch.request import RunRequest
from lustrain.problem import UNREACHABLE, UserError
from trainer.errors import EXIT_REQUEUE


def dry_run(request: RunRequest, plan: LaunchPlan) -> tuple[list[str], dict[str, Any]]:
    """Return what a start would write and run, as lines and for programs."""
    files = {request.config_uri: request.config} | {f"{request.run}/{key}": text for key, text in plan.files.items()}
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
    store = runs.register_run(request, resume=resume, files=plan.files)
    try:
        submission = backend.submit(request, plan, folder, store, output)
    except UserError as error:
        if not resume and error.exit_code != UNREACHABLE:
            runs.unregister_run(store, plan.files)
        raise
    if submission.job is not None:
        runs.save_job(store, request.backend, submission.job)
    elif submission.code == EXIT_REQUEUE:
        submission = replace(submission, lines=(*submission.lines, "next: the same fab train with --resume"))
    return submission
