"""The report of a build: steps with their seconds and how much was cached, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from images.model import Built, Step
from lustrain.tables import table

VERSION = 1
LONGEST_NAME = 100
_MB = 1e6


def lines(built: Built) -> list[str]:
    """Return a table of the Dockerfile's steps that ran and of what took time besides, then totals."""
    own = [step for step in built.steps if not step.cached and " FROM " not in step.name]
    shown = [step for step in own if step.stage != "internal" or step.seconds >= 0.5 or step.error]
    rows = [(_seconds(step), step.shown[:LONGEST_NAME]) for step in shown]
    return [*table(("s", "step"), rows, right=("s",)), "", _totals(built)] if rows else [_totals(built)]


def as_json(built: Built) -> dict[str, Any]:
    """Return the report of a build as one JSON object; seconds and bytes."""
    cached, counted = _cached(built.steps)
    found: dict[str, Any] = {
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
    return found


def _totals(built: Built) -> str:
    cached, counted = _cached(built.steps)
    share = f", {cached} of {counted} steps cached" if counted else ""
    failed = sum(step.error is not None for step in built.steps)
    bad = f", {failed} failed without ending the build" if failed else ""
    digest = f", {built.digest}" if built.digest else ""
    return f"{built.seconds:.1f} s{share}{bad}{digest}"


def _cached(steps: Sequence[Step]) -> tuple[int, int]:
    """How many were cached, of those that can be: BuildKit's own steps run each time."""
    own = [step for step in steps if step.stage != "internal"]
    return sum(step.cached for step in own), len(own)


def _seconds(step: Step) -> str:
    if step.error:
        return "failed"
    return "cached" if step.cached else f"{step.seconds:.1f}"
