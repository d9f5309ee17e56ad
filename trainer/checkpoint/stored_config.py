"""The run's own record of its configuration: stored once, compared at every resume.

`config.toml` in the run is the resolved configuration plus a `[recorded]` table with what the Task saw. A resume may change how
the run goes on (steps, learning rate, schedule, clipping, logging, world size, micro-batch, …) but not what it is: the model,
the data, their order, the global batch, the optimizer. Compared are values, key by key: a key that one side lacks counts as its
default, so that a setting which a later version adds refuses no run of an earlier one.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from awscrt.checksums import crc64nvme

from lustrain.problem import UserError, problem
from trainer import __version__
from trainer.config import RECORDED, REMOVED, Config, default_settings, parse_toml, to_toml
from trainer.storage import ObjectMissingError, ObjectStore

FORMAT = 1
KEY = "config.toml"
IDENTITY = ("run.seed", "task.name", "train.global_batch", "optimizer", "fingerprint")
"""What a resume may not change: these keys, and everything below them but MAY_CHANGE."""
MAY_CHANGE = ("optimizer.lr", "optimizer.fused")
"""How far a step goes and which kernel computes it: what AdamW's stored moments mean does not depend on either."""
_CHECKSUM = re.compile(rb"^# record_crc64nvme ([0-9a-f]{16})\n", re.MULTILINE)
"""The last line, a comment: the checksum of all that is before it."""


class DamagedConfigError(UserError):
    """The run's configuration is not what was stored."""


@dataclass(frozen=True)
class StoredConfig:
    """What the run says about itself: settings and fingerprint as flat `path -> value`, and the etag to replace it by."""

    settings: dict[str, Any]
    etag: str


def read_stored(store: ObjectStore) -> StoredConfig | None:
    """Return the run's configuration, None for a new run; UserError if it is damaged or from a newer Lustrain."""
    where = f"{store.uri}/{KEY}"
    try:
        table, etag = _decoded(store)
    except ObjectMissingError:
        return None
    except ValueError as error:
        fix = "restore it from a copy; if somebody changed it by hand, remove the line record_crc64nvme"
        raise DamagedConfigError(problem(where, "…", f"is damaged: {error}", fix=fix)) from None
    recorded = recorded_in(table)
    table.pop(RECORDED, None)
    version = recorded.get("format")
    if not isinstance(version, int) or version > FORMAT:
        fix = "upgrade lustrain, or choose another run.uri"
        raise UserError(
            problem(
                f"{where} [{RECORDED}] format", version, "not a run of this version", allowed=f"<= {FORMAT}", fix=fix
            )
        )
    return StoredConfig(flatten({**table, "fingerprint": recorded.get("fingerprint", {})}), etag)


def decode(raw: bytes, *, final: bool = True) -> dict[str, Any]:
    """Return the table in the file; ValueError when it is not TOML, or not what its checksum says."""
    try:
        table = parse_toml(raw.decode())
    except ValueError as error:
        raise ValueError(f"not TOML: {error}") from error
    recorded = _CHECKSUM.search(raw)
    checksum = f"{crc64nvme(_CHECKSUM.sub(b'', raw)):016x}"
    version = recorded_in(table).get("format")
    # A newer version may keep its checksum in another way, and is refused for being newer.
    newer = isinstance(version, int) and version > FORMAT
    if recorded and recorded[1].decode() != checksum and not (newer and final):
        raise ValueError(f"checksum {checksum}, but the file records {recorded[1].decode()}")
    return table


def recorded_in(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `[recorded]` table, empty where there is none."""
    recorded = table.get(RECORDED)
    return recorded if isinstance(recorded, dict) else {}


def encode(config: Config, fingerprint: Mapping[str, Any]) -> bytes:
    """Return the file as this version writes it."""
    recorded = {"format": FORMAT, "lustrain": __version__, "fingerprint": _without_null(fingerprint)}
    body = to_toml(config, recorded).encode()
    return body + f"# record_crc64nvme {crc64nvme(body):016x}\n".encode()


def settings_of(config: Config, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """`config` as flat `path -> value`, with the Task's fingerprint beside it, as it reads back from TOML."""
    read_back = json.loads(json.dumps(_without_null(fingerprint)))
    return flatten(tomllib.loads(to_toml(config)) | {"fingerprint": read_back})


def defaults_with(fingerprint_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value that a missing key stands for, `path -> value`: settings by Config, the fingerprint by its Task."""
    return default_settings() | flatten({"fingerprint": fingerprint_defaults})


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return `path -> (before, now)` where they differ, in order; a missing key counts as its default, else as None."""
    pairs = {
        path: (stored.get(path, defaults.get(path)), wanted.get(path, defaults.get(path)))
        for path in sorted(stored.keys() | wanted.keys())
    }
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def refusals(stored: Mapping[str, Any], wanted: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """One line for every difference that would make this another run."""
    return [
        _refusal(path, before, now, stored, wanted)
        for path, (before, now) in differences(stored, wanted, defaults).items()
        if _is_identity(path) and not _means_nothing_now(path, before)
    ]


def _is_identity(path: str) -> bool:
    within = any(path == identity or path.startswith(f"{identity}.") for identity in IDENTITY)
    return within and path not in MAY_CHANGE


def _means_nothing_now(path: str, before: Any) -> bool:
    """Return whether a setting was removed, and the run did not use what was removed with it."""
    section, _, key = path.partition(".")
    return (section, key) in REMOVED and REMOVED[section, key][0] != before


def _refusal(path: str, before: Any, now: Any, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the line for one difference, under the key that a user writes: a fingerprint calls `task.seq_len` `seq_len`.

    What no setting holds, such as a tokenizer's checksum, follows from the table as a whole: `[task] tokenizer`.
    """
    fix = "restore the old value, or choose another run.uri"
    why = f"the run was trained with {before!r}, and a resume may not change this"
    if now is None:
        now, fix = before, "go on with the version of Lustrain that wrote it, or choose another run.uri"
        why = "the run was trained with it, and this version does not know it"
    elif before is None:
        why = "the run does not record what it was trained with, and this version has no default for it"
    key, name = path, path.removeprefix("fingerprint.")
    if name != path:
        keys = (f"task.{name}", f"task.{name.removeprefix('model.')}")
        key = next((item for item in keys if item in wanted or item in stored), f"[task] {name}")
        if wanted.get(key, now) != now:
            # The setting is a place, and the fingerprint says what lies there.
            now, why = wanted[key], f"holds {now!r}, {why}"
    return problem(key, now, why, fix=fix)


def check(
    store: ObjectStore, config: Config, fingerprint: Mapping[str, Any], fingerprint_defaults: Mapping[str, Any]
) -> StoredConfig | None:
    """Return what the run holds so far; UserError names every setting that would make it a different run. Write nothing."""
    stored = read_stored(store)
    if stored is not None:
        lines = refusals(stored.settings, settings_of(config, fingerprint), defaults_with(fingerprint_defaults))
        if lines:
            raise UserError(lines)
    return stored


def record(
    store: ObjectStore,
    stored: StoredConfig | None,
    config: Config,
    fingerprint: Mapping[str, Any],
    fingerprint_defaults: Mapping[str, Any],
) -> dict[str, tuple[Any, Any]]:
    """Store the configuration of the attempt that owns the run now; returns what changed as `path -> (before, after)`.

    Keys that the run lacked are stored with their defaults, and are no change. PreconditionError when another job has
    stored its own since `stored` was read.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    if stored is not None:
        wanted = settings_of(config, fingerprint)
        if wanted == stored.settings:
            return {}
        changes = differences(stored.settings, wanted, defaults_with(fingerprint_defaults))
    store.swap(KEY, encode(config, fingerprint), stored.etag if stored else None)
    return changes


def _decoded(store: ObjectStore) -> tuple[dict[str, Any], str]:
    """Table and etag, read again where the first answer is damaged: the network may have garbled it."""
    raw, etag = store.read(KEY)
    try:
        return decode(raw, final=False), etag
    except ValueError:
        raw, etag = store.read(KEY)
        return decode(raw), etag


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested table as `a.b.c -> value`; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def _without_null(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without entries that are None, which TOML cannot hold."""
    return {
        key: _without_null(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
