"""The record of a sweep, one object in its folder, stored before its first run is registered."""

from __future__ import annotations

import getpass
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launch.runs import read_record
from launch.sweep.grid import Point, shown
from launch.sweep.plan import SearchPlan, SweepPlan
from launch.sweep.search import OPTUNA
from lustrain.problem import UserError, problem
from trainer.checkpoint.stored_config import flatten
from trainer.config import default_settings, parse_toml
from trainer.run.journal import REQUEST, encode_record
from trainer.storage import ObjectStore, PreconditionError, open_store

RECORD = "sweep.json"
VERSION = 1
GO_ON = "go on with the same values and settings, or choose another --name"


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was recorded."""

    store: ObjectStore
    """Its folder, in which each run has one of its own."""
    settings: str
    points: tuple[Point, ...]
    search: Mapping[str, Any] | None = None
    """The space and the seed of a search, whose points grow in number; None of a grid."""


def register_sweep(plan: SweepPlan) -> Sweep:
    """Record the sweep, or find the record of the same one. UserError where the folder holds another sweep, or a run."""
    sweep = Sweep(_open(plan.uri), plan.settings, plan.points)
    recorded = _record(sweep)
    if recorded.search is not None or recorded.points != plan.points:
        kind = f"of {len(recorded.points)} points from {shown(recorded.points[0].values)} on"
        why = f"holds another sweep, {kind if recorded.search is None else 'a search'}"
        raise UserError(problem("--grid", plan.uri, why, fix=GO_ON))
    _refuse_other_settings(plan.uri, recorded.settings, plan.settings)
    return sweep


def register_search(plan: SearchPlan) -> Sweep:
    """Record the search without points, or find the record of the same one, with its points. UserError as `register_sweep`."""
    search = {"by": OPTUNA, "space": dict(plan.texts), "seed": plan.seed}
    recorded = _record(Sweep(_open(plan.uri), plan.settings, (), search))
    if recorded.search != search:
        raise UserError(problem("--space", plan.uri, "holds another sweep, or one with another space", fix=GO_ON))
    _refuse_other_settings(plan.uri, recorded.settings, plan.settings)
    return recorded


def add_point(sweep: Sweep, point: Point) -> Sweep:
    """Record one more point of a search. UserError where another process has done so meanwhile."""
    data, etag = sweep.store.read(RECORD)
    body = json.loads(data)
    if body["points"] == [_point(known) for known in sweep.points]:
        body["points"].append(_point(point))
        try:
            sweep.store.put(RECORD, encode_record(body), if_match=etag)
        except PreconditionError:
            pass
        else:
            return replace(sweep, points=(*sweep.points, point))
    why = "another fab sweep has added a point to it"
    raise UserError(problem("run.uri", sweep.store.uri, why, fix="let that one go on"))


def _open(uri: str) -> ObjectStore:
    store = open_store(uri, name="run.uri")
    if read_record(store, REQUEST) is not None:
        fix = "choose another --name or run.uri"
        raise UserError(problem("run.uri", uri, "is a run, and not a sweep", fix=fix))
    return store


def _record(sweep: Sweep) -> Sweep:
    """Put the record of a sweep if there is none, and return what is recorded."""
    by = f"{getpass.getuser()}@{platform.node()}"
    body = {"version": VERSION, "by": by, "created": time.time(), "settings": sweep.settings}
    body |= {"search": sweep.search} if sweep.search is not None else {}
    body |= {"points": [_point(point) for point in sweep.points]}
    try:
        sweep.store.put(RECORD, encode_record(body), if_absent=True)
    except PreconditionError:
        return load_sweep(sweep.store)
    return sweep


def _point(point: Point) -> dict[str, Any]:
    return {"name": point.name, "values": dict(point.values)}


def unregister_sweep(sweep: Sweep) -> None:
    """Delete the record, unless a run of the sweep is registered."""
    if all(read_record(sweep.store, f"{point.name}/{REQUEST}") is None for point in sweep.points):
        sweep.store.delete(RECORD)


def load_sweep(store: ObjectStore) -> Sweep:
    """Return the sweep in this folder. UserError where there is none that this version knows."""
    record = read_record(store, RECORD)
    if record is None:
        raise UserError(
            problem("SWEEP", store.uri, "there is no sweep", fix="give its folder, or its name with --cluster")
        )
    if record.get("version") != VERSION:
        why = "is not a record of a sweep that this version knows"
        raise UserError(
            problem("object", f"{store.uri.rstrip('/')}/{RECORD}", why, fix="use the Lustrain that wrote it")
        )
    points = tuple(Point(str(point["name"]), point["values"]) for point in record["points"])
    return Sweep(store, str(record["settings"]), points, record.get("search"))


def _refuse_other_settings(uri: str, before: str, after: str) -> None:
    if changed := changed_settings(before, after):
        why = f"the sweep was begun with another {', '.join(changed)}"
        raise UserError(problem("run.uri", uri, why, fix=GO_ON))


def changed_settings(before: str, after: str) -> list[str]:
    """Return the settings in which two TOML texts differ; one that only one of them has counts with its default."""
    defaults = default_settings()
    old, new = defaults | flatten(parse_toml(before)), defaults | flatten(parse_toml(after))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
