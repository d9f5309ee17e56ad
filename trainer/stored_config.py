"""The run's own record of its configuration: stored once, compared at every resume.

`config.toml` in the run is the resolved configuration plus a `[recorded]` table with what the Task saw. A resume may change how
the run goes on (steps, schedule, logging, world size, micro-batch, …) but not what it is: the model, the data, their order, the
global batch, the optimizer.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer import __version__
from trainer.config import RECORDED, Config, parse_toml, to_toml
from trainer.errors import UserError, problem
from trainer.storage import ObjectMissingError, ObjectStore, PreconditionError

FORMAT = 1
KEY = "config.toml"
IDENTITY = ("run.seed", "task.name", "train.global_batch", "optimizer", "fingerprint")
"""What a resume may not change: these keys, and everything below them."""


@dataclass(frozen=True)
class StoredConfig:
    """What the run says about itself: settings and fingerprint as flat `path -> value`, and the etag to replace it by."""

    settings: dict[str, Any]
    etag: str


def read_stored(store: ObjectStore) -> StoredConfig | None:
    """The run's configuration, None for a run that has none yet; UserError for one written by a newer Lustrain or damaged."""
    try:
        raw, etag = store.read(KEY)
    except ObjectMissingError:
        return None
    where = f"{store.uri}/{KEY}"
    try:
        table = parse_toml(raw.decode())
    except ValueError as error:
        raise UserError(problem(where, "…", f"is not TOML: {error}", fix="restore it from a copy")) from None
    recorded = table.pop(RECORDED, {})
    version = recorded.get("format")
    if not isinstance(version, int) or version > FORMAT:
        fix = "upgrade lustrain, or choose another run.uri"
        raise UserError(
            problem(
                f"{where} [{RECORDED}] format", version, "not a run of this version", allowed=f"<= {FORMAT}", fix=fix
            )
        )
    return StoredConfig(flatten({**table, "fingerprint": recorded.get("fingerprint", {})}), etag)


def settings_of(config: Config, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as flat `path -> value`, with the Task's fingerprint beside it, as it reads back from TOML."""
    return flatten(tomllib.loads(to_toml(config)) | {"fingerprint": json.loads(json.dumps(fingerprint))})


def refusals(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for every difference that would make this another run."""
    return [
        problem(
            path.removeprefix("fingerprint."),
            wanted.get(path),
            f"the run was trained with {stored.get(path)!r}, and a resume may not change this",
            fix="restore the old value, or choose another run.uri",
        )
        for path in changed(stored, wanted)
        if any(path == identity or path.startswith(f"{identity}.") for identity in IDENTITY)
    ]


def changed(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Paths whose values differ or that only one side has, in order."""
    missing = object()
    return [
        path for path in sorted(stored.keys() | wanted.keys()) if stored.get(path, missing) != wanted.get(path, missing)
    ]


def check(store: ObjectStore, config: Config, fingerprint: Mapping[str, Any]) -> StoredConfig | None:
    """What the run holds so far; UserError names every setting that would make this another run. Writes nothing."""
    stored = read_stored(store)
    if stored is not None:
        lines = refusals(stored.settings, settings_of(config, fingerprint))
        if lines:
            raise UserError(lines)
    return stored


def record(
    store: ObjectStore, stored: StoredConfig | None, config: Config, fingerprint: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Store the configuration of the attempt that owns the run now; returns what changed as `path -> (before, after)`."""
    body = to_toml(config, {"format": FORMAT, "lustrain": __version__, "fingerprint": dict(fingerprint)}).encode()
    if stored is None:
        try:
            store.put(KEY, body, if_absent=True)
        except PreconditionError:
            if store.read(KEY)[0] != body:  # else an answer was lost, and the retry met its own success
                raise
        return {}
    wanted = settings_of(config, fingerprint)
    differences = {path: (stored.settings.get(path), wanted.get(path)) for path in changed(stored.settings, wanted)}
    if differences:
        store.put(KEY, body, if_match=stored.etag)
    return differences


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table as `a.b.c -> value`; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat
