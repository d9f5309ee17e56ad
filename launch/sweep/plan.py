"""A sweep, planned from flags, settings and Cluster: the requests of all its runs, made before the first one starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.flags import SweepFlags
from launch.request import RequestBackend, RunRequest, resolve_request, run_uri
from launch.sweep.grid import MAX_POINTS, Point, combinations, parse_grid, point_name, shown
from launch.sweep.search import OPTUNA, Choices, Range, examples, load_optuna, parse_space
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

    @property
    def backend(self) -> str:
        return self.requests[0].backend


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
    if flags.space or flags.trials is not None:
        flag, value = ("--space", flags.space[0]) if flags.space else ("--trials", flags.trials)
        raise UserError(problem(flag, value, "only valid with --search", fix="--search optuna, or --grid"))
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


@dataclass(frozen=True)
class SearchPlan:
    """A sweep whose points follow from the results of the points before them."""

    uri: str
    """The folder of its runs."""
    settings: str
    """The resolved settings without what is searched, TOML, in which `run.uri` is the sweep's."""
    space: Mapping[str, Range | Choices]
    texts: Mapping[str, str]
    """The space as it was given."""
    seed: int
    trials: int
    """Points in all, with those of earlier starts."""
    backend: str
    request: Callable[[Point], RunRequest]
    """Returns the request of a point. UserError where its values are refused."""

    def point(self, values: Mapping[str, str]) -> Point:
        return Point(point_name(self.uri.rpartition("/")[2], values), values)


def plan_search(
    flags: SweepFlags,
    cluster: Cluster | None,
    backends: Mapping[str, RequestBackend],
    folder: Path,
    image: tuple[str, str] = ("", ""),
) -> SearchPlan:
    """Return the search that the flags make, as `plan_sweep`; the ends of its space are checked as points. UserError."""
    if flags.search != OPTUNA:
        raise UserError(problem("--search", flags.search, "is not a way to search", allowed=OPTUNA))
    if flags.grid:
        fix = "leave it out: in a search --space names the values"
        raise UserError(problem("--grid", flags.grid[0], "only valid without --search", fix=fix))
    space = parse_space(flags.space, flags.set)
    if flags.trials is None:
        raise UserError(problem("--trials", None, "is missing: a search has no end of its own", allowed="a number"))
    trials = int(number("--trials", flags.trials, 1, MAX_POINTS))
    base = config.load(Path(flags.config), flags.set)
    without_uri: list[Problem] = []
    uri = run_uri(flags, base, cluster, folder, without_uri)
    if not base.eval.every:
        fix = "--set eval.every=N"
        without_uri.append(problem("eval.every", 0, "a search goes by the validation loss, which is off", fix=fix))
    if without_uri:
        raise UserError(without_uri)
    run_flags = dataclasses.replace(flags, name=None)

    def request(point: Point) -> RunRequest:
        settings = config.load(Path(flags.config), [*flags.set, *_sets(point.values)])
        return resolve_request(run_flags, _at(settings, f"{uri}/{point.name}"), cluster, backends, folder, image)

    texts = {text.partition("=")[0].strip(): text.partition("=")[2].strip() for text in flags.space}
    plan = SearchPlan(uri, to_toml(_at(base, uri)), space, texts, base.run.seed, trials, "", request)
    problems: dict[tuple[str, ...], str] = {}
    checked: list[RunRequest] = []
    for values in examples(space):
        try:
            checked.append(request(plan.point(values)))
        except UserError as error:
            _add_new(problems, error)
    if problems:
        raise UserError(problems.values())
    if not checked[0].supervised_by_caller:
        in_turn = " or ".join(name for name, backend in backends.items() if backend.supervised_by_caller)
        why = f"a search trains its points in turn, which {checked[0].backend} does not; only valid with --on {in_turn}"
        raise UserError(problem("--search", OPTUNA, why, fix="--grid"))
    load_optuna()
    return dataclasses.replace(plan, backend=checked[0].backend)


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
