"""A sweep, planned from flags, settings and Cluster: the requests of all its runs, made before the first one starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.flags import SweepFlags
from launch.request import RequestBackend, RunRequest, resolve_request, run_uri
from launch.sweep.grid import MAX_POINTS, Point, combinations, parse_grid, point_name, shown
from lustrain.cluster import Cluster
from lustrain.flags import number
from lustrain.problem import Problem, UserError, problem
from trainer import config
from trainer.config import Config, to_toml


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, in the order in which they start."""

    uri: str
    """The folder of its runs."""
    settings: str
    """The resolved settings of the first point, TOML, in which `run.uri` is the sweep's."""
    points: tuple[Point, ...]
    requests: tuple[RunRequest, ...]
    """One a point."""


def plan_sweep(
    flags: SweepFlags,
    cluster: Cluster | None,
    backends: Mapping[str, RequestBackend],
    folder: Path,
    image: tuple[str, str] = ("", ""),
) -> SweepPlan:
    """Return the sweep that the flags make; UserError with one line for each kind of mistake in any of its points.

    `folder` and `image` are as in `resolve_request`. Nothing but the file of the settings is read.
    """
    limit = int(number("--max-points", flags.max_points, 1, MAX_POINTS))
    values = combinations(parse_grid(flags.grid, flags.set), limit)
    problems: dict[tuple[str, ...], str] = {}
    settings: list[Config] = []
    for point_values in values:
        try:
            settings.append(config.load(Path(flags.config), [*flags.set, *_sets(point_values)]))
        except UserError as error:
            _add_new(problems, error)
    if problems:
        raise UserError(problems.values())
    _refuse_equal(values, settings)
    without_uri: list[Problem] = []
    uri = run_uri(flags, settings[0], cluster, folder, without_uri)
    if without_uri:
        raise UserError(without_uri)
    points = [Point(point_name(uri.rpartition("/")[2], point_values), point_values) for point_values in values]
    run_flags = dataclasses.replace(flags, name=None)
    requests: list[RunRequest] = []
    for point, of_point in zip(points, settings, strict=True):
        placed = _at(of_point, f"{uri}/{point.name}")
        try:
            requests.append(resolve_request(run_flags, placed, cluster, backends, folder, image))
        except UserError as error:
            _add_new(problems, error)
    if problems:
        raise UserError(problems.values())
    return SweepPlan(uri, to_toml(_at(settings[0], uri)), tuple(points), tuple(requests))


def _add_new(problems: dict[tuple[str, ...], str], error: UserError) -> None:
    """Add what is not known yet: a mistake in the key stands in the problems of all its values."""
    for line in error.problems:
        problems.setdefault((line.path, line.why, line.allowed, line.fix), line)


def _sets(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _at(settings: Config, uri: str) -> Config:
    return settings.model_copy(update={"run": settings.run.model_copy(update={"uri": uri})})


def _refuse_equal(values: Sequence[Mapping[str, str]], settings: Sequence[Config]) -> None:
    """Refuse two points with equal settings, as `0.01` and `1e-2` make them."""
    seen: dict[str, Mapping[str, str]] = {}
    for point_values, of_point in zip(values, settings, strict=True):
        text = to_toml(of_point)
        if text in seen:
            why = f"has the same settings as {shown(seen[text])}"
            raise UserError(problem("--grid", shown(point_values), why, fix="name each value once"))
        seen[text] = point_values
