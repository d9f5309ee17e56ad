"""The points of a sweep from its `--grid` flags, with the names of their runs: pure text, before any setting is checked."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lustrain.problem import Problem, UserError, problem

T = TypeVar("T")

MAX_POINTS = 1000
MAX_NAME = 52
"""Characters of a run's name: that of a Job of Kubernetes has no more (`launch.backends.kubernetes.JOB_NAME`)."""
DIGEST = 8
"""Hex digits that tell apart points whose names read alike, and equal points of two sweeps in one namespace."""
FORM = "KEY=VALUE,VALUE…, like optimizer.lr=0.001,0.01"
OWN_SETTINGS = ("run.uri", "run.resume", "interrupt.stop_uri")
"""Settings by which a run is found and stopped."""
_SETTING = re.compile(r"\w+(\.\w+)+", re.ASCII)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    values: Mapping[str, str]
    """Text of each varied setting, as `--set` takes it."""


def parse_grid(grid: Sequence[str], sets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each varied setting, in the order of the flags; `sets` are those of `--set`. UserError."""

    def values(text: str) -> tuple[str, ...] | None:
        parts = tuple(split_values(text))
        return None if "" in parts else parts

    return parse_settings("--grid", grid, sets, values, FORM)


def parse_settings(
    flag: str, texts: Sequence[str], sets: Sequence[str], read: Callable[[str], T | None], form: str
) -> dict[str, T]:
    """Return what `read` makes of the text after `KEY=`, by setting; None is text that is not of the `form`. UserError."""
    if not texts:
        raise UserError(problem(flag, None, "is missing: no setting is varied", allowed=form))
    fixed = {text.partition("=")[0].strip() for text in sets}
    varied: dict[str, T] = {}
    problems: list[Problem] = []
    for text in texts:
        key, _, after = (part.strip() for part in text.partition("="))
        values = read(after)
        if not _SETTING.fullmatch(key) or values is None:
            problems.append(problem(flag, text, "does not say what values a setting takes", allowed=form))
        elif key in OWN_SETTINGS:
            problems.append(problem(flag, text, f"every run has its own {key}", fix="--name names the sweep"))
        elif key in varied or key in fixed:
            where = f"another {flag}" if key in varied else "--set"
            problems.append(problem(flag, text, f"{key} is in {where} too", fix="name it once"))
        else:
            varied[key] = values
    if problems:
        raise UserError(problems)
    return varied


def split_values(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes: `[1,2],[3,4]` is two values."""
    values, depth, quote, start = [], 0, "", 0
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            values.append(text[start:at])
            start = at + 1
    return [value.strip() for value in (*values, text[start:])]


def combinations(grid: Mapping[str, Sequence[str]], limit: int) -> list[dict[str, str]]:
    """Return the values of every point, the last setting varying fastest. UserError above `limit` points."""
    count = math.prod(map(len, grid.values()))
    if count > limit:
        fix = f"fewer values, or --max-points {count}" if count <= MAX_POINTS else "fewer values"
        raise UserError(problem("--grid", count, "are too many points", allowed=f"up to {limit}", fix=fix))
    return [dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*grid.values())]


def shown(values: Mapping[str, str]) -> str:
    """Return the values of a point for people."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def point_name(sweep: str, values: Mapping[str, str]) -> str:
    """Return the name of a point's run: its values as far as they fit, and a digest of all of them and the sweep's name.

    Small letters, digits and `-` are valid on every backend.
    """
    last = [key.rpartition(".")[2] for key in values]
    keys = last if len(set(last)) == len(last) else list(values)
    words = "-".join(word for pair in zip(keys, values.values(), strict=True) for word in pair)
    slug = re.sub("[^a-z0-9]+", "-", words.lower()).strip("-")[: MAX_NAME - DIGEST - 1].rstrip("-")
    identity = json.dumps([sweep, sorted(values.items())]).encode()
    return f"{slug or 'point'}-{hashlib.sha256(identity).hexdigest()[:DIGEST]}"
