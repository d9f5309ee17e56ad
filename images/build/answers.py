"""Answers of the tasks: plans, builds and records as lines and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from images.build import report
from images.build.make import Made, Planned
from images.plan import changes
from images.wish import LOCAL
from lustrain import image_file
from lustrain.image_file import GitState, Record

_SHOWN = 5


def plan(planned: Planned) -> dict[str, Any]:
    made = planned.plan
    return {
        "version": 1,
        "target": made.target,
        "platform": made.platform,
        "ref": planned.ref,
        "dockerfile": made.dockerfile,
        "arguments": dict(made.arguments),
        "labels": dict(made.labels),
        "git": _git(planned.git),
        "inputs": {layer: dict(found) for layer, found in planned.context.inputs.items()},
        "rebuilds": changes.as_json(planned.rebuilds),
    }


def plan_lines(planned: Planned) -> list[str]:
    given = [f"  {name} = {value}" for name, value in sorted(planned.plan.arguments.items()) if value]
    return [
        planned.ref,
        f"  {planned.plan.dockerfile}, target {planned.plan.target}, {planned.plan.platform}",
        *given,
        *dirt(planned.git),
        *changes.lines(planned.rebuilds),
    ]


def build(made: Made) -> dict[str, Any]:
    record = None if made.record is None else image_file.as_json(made.record)
    return {**report.as_json(made.built), "ref": made.planned.ref, "git": _git(made.planned.git), "image": record}


def build_lines(made: Made, file: str) -> list[str]:
    lines = [*report.lines(made.built), *dirt(made.planned.git)]
    if made.record is not None:
        return [*lines, *record_lines(made.record, file)]
    if made.built.image_id is None:
        return [*lines, f"pushed without a tag: {made.planned.plan.repository}@{made.built.digest}"]
    if made.planned.plan.repository == LOCAL:
        return [
            *lines,
            f"in the engine as {made.planned.ref}; to push it, build with --push --repository registry/name",
        ]
    return [*lines, f"in the engine as {made.planned.ref}; `fab image-push` pushes it"]


def record_lines(record: Record, file: str) -> list[str]:
    return [f"pushed {record.ref}", f"{file}: {record.deployable}, content {record.content[:19]}…"]


def dirt(git: GitState) -> list[str]:
    """One line where the image is not what a commit says."""
    if git.commit is None:
        return ["not from a commit: later it cannot be told which code this is"]
    if not git.dirty:
        return []
    more = ", …" if len(git.changed) > _SHOWN else ""
    return [f"not what commit {git.commit[:12]} says: {', '.join(git.changed[:_SHOWN])}{more}"]


def _git(git: GitState) -> Mapping[str, Any]:
    return {"commit": git.commit, "dirty": git.dirty, "changed": list(git.changed)}
