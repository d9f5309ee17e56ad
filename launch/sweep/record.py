"""The record of a sweep, one object in its folder, stored before its first run is registered."""

from __future__ import annotations

import getpass
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.runs import read_record
from launch.sweep.grid import Point, shown
from launch.sweep.plan import SweepPlan
from lustrain.problem import UserError, problem
from trainer.config import default_settings, parse_toml
from trainer.run.journal import REQUEST
from trainer.storage import ObjectStore, PreconditionError, open_store

RECORD = "sweep.json"
VERSION = 1


@dataclass(frozen=True)
class Sweep:
    """A sweep as it was recorded."""

    store: ObjectStore
    """Its folder, in which each run has one of its own."""
    settings: str
    points: tuple[Point, ...]


def register_sweep(plan: SweepPlan) -> Sweep:
    """Record the sweep, or find the record of the same one. UserError where the folder holds another sweep, or a run."""
    store = open_store(plan.uri, name="run.uri")
    if read_record(store, REQUEST) is not None:
        fix = "choose another --name or run.uri"
        raise UserError(problem("run.uri", plan.uri, "is a run, and not a sweep", fix=fix))
    points = [{"name": point.name, "values": dict(point.values)} for point in plan.points]
    by = f"{getpass.getuser()}@{platform.node()}"
    body = {"version": VERSION, "by": by, "created": time.time(), "settings": plan.settings, "points": points}
    try:
        store.put(RECORD, json.dumps(body, indent=1).encode() + b"\n", if_absent=True)
    except PreconditionError:
        _refuse_other(plan, load_sweep(store))
    return Sweep(store, plan.settings, plan.points)


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
    return Sweep(store, str(record["settings"]), points)


def _refuse_other(plan: SweepPlan, recorded: Sweep) -> None:
    fix = "go on with the same --grid and settings, or choose another --name"
    if recorded.points != plan.points:
        why = f"holds another sweep, of {len(recorded.points)} points from {shown(recorded.points[0].values)} on"
        raise UserError(problem("--grid", plan.uri, why, fix=fix))
    if changed := changed_settings(recorded.settings, plan.settings):
        why = f"the sweep was begun with another {', '.join(changed)}"
        raise UserError(problem("run.uri", plan.uri, why, fix=fix))


def changed_settings(before: str, after: str) -> list[str]:
    """Return the settings in which two TOML texts differ; one that only one of them has counts with its default."""
    defaults = default_settings()
    old, new = defaults | _flat(parse_toml(before)), defaults | _flat(parse_toml(after))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
