"""What the tasks print: plans, builds and records as lines and as JSON; times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from images.build.make import BuildResult, PreparedBuild
from images.flags import LOCAL
from images.model import Built
from images.plan import changes
from lustrain import image_file
from lustrain.image_file import GitState, ImageRecord
from lustrain.tables import table

VERSION = 1
LONGEST_NAME = 100
_SHOWN = 5


def plan(prepared: PreparedBuild) -> dict[str, Any]:
    return {
        "version": VERSION,
        "target": prepared.plan.target,
        "platform": prepared.plan.platform,
        "ref": prepared.ref,
        "dockerfile": prepared.plan.dockerfile,
        "arguments": dict(prepared.plan.arguments),
        "labels": dict(prepared.plan.labels),
        "git": _git(prepared.git),
        "inputs": {layer: dict(inputs) for layer, inputs in prepared.context.inputs.items()},
        "rebuilds": changes.as_json(prepared.rebuilds),
    }


def plan_lines(prepared: PreparedBuild) -> list[str]:
    return [
        prepared.ref,
        f"  {prepared.plan.dockerfile}, target {prepared.plan.target}, {prepared.plan.platform}",
        *(f"  {name} = {value}" for name, value in sorted(prepared.plan.arguments.items()) if value),
        *_dirt(prepared.git),
        *changes.lines(prepared.rebuilds),
    ]


def build(result: BuildResult) -> dict[str, Any]:
    record = None if result.record is None else image_file.as_json(result.record)
    return {**steps(result.built), "ref": result.prepared.ref, "git": _git(result.prepared.git), "image": record}


def build_lines(result: BuildResult, file: str) -> list[str]:
    lines = [*step_lines(result.built), *_dirt(result.prepared.git)]
    if result.record is not None:
        return [*lines, *record_lines(result.record, file)]
    local = result.prepared.plan.repository == LOCAL
    push = "; to push it, build with --push --repository registry/name" if local else "; `fab image-push` pushes it"
    return [*lines, f"in the engine as {result.prepared.ref}{push}"]


def record_lines(record: ImageRecord, file: str) -> list[str]:
    return [f"pushed {record.ref}", f"{file}: {record.deployable}, content {record.content[:19]}…"]


def steps(built: Built) -> dict[str, Any]:
    cached, counted = _cached(built)
    return {
        "version": VERSION,
        "digest": built.digest,
        "image_id": built.image_id,
        "seconds": built.seconds,
        "cached_share": round(cached / counted, 3) if counted else None,
        "steps": [
            {
                "name": step.name,
                "stage": step.stage,
                "seconds": step.seconds,
                "cached": step.cached,
                "error": step.error,
            }
            for step in built.steps
        ],
    }


def step_lines(built: Built) -> list[str]:
    """Return a table of the Dockerfile's steps that ran and of what took time besides, then totals."""
    ran = [step for step in built.steps if not step.cached and " FROM " not in step.name]
    shown = [step for step in ran if step.stage != "internal" or step.seconds >= 0.5 or step.error]
    rows = [("failed" if step.error else f"{step.seconds:.1f}", step.shown[:LONGEST_NAME]) for step in shown]
    cached, counted = _cached(built)
    failed = sum(step.error is not None for step in built.steps)
    totals = [
        f"{built.seconds:.1f} s",
        f"{cached} of {counted} steps cached" if counted else "",
        f"{failed} failed without ending the build" if failed else "",
        built.digest or "",
    ]
    head = [*table(("s", "step"), rows, right=("s",)), ""] if rows else []
    return [*head, ", ".join(filter(None, totals))]


def _cached(built: Built) -> tuple[int, int]:
    """Return how many steps were cached, of those that can be: BuildKit's own steps run each time."""
    own = [step for step in built.steps if step.stage != "internal"]
    return sum(step.cached for step in own), len(own)


def _dirt(git: GitState) -> list[str]:
    """Return one line where the image is not what a commit says."""
    if git.commit is None:
        return ["not from a commit: nothing will show which code this is"]
    if not git.dirty:
        return []
    more = ", …" if len(git.changed) > _SHOWN else ""
    return [f"not what commit {git.commit[:12]} says: {', '.join(git.changed[:_SHOWN])}{more}"]


def _git(git: GitState) -> Mapping[str, Any]:
    return {"commit": git.commit, "dirty": git.dirty, "changed": list(git.changed)}
