"""Unit files as systemd reads them, as far as the stand-in for systemctl needs them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

TRANSIENT = "/run/systemd/transient"
"""Of systemd-run's units, which are gone once they are inactive."""
FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    TRANSIENT,
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
_FLAGS = ("1", "yes", "true", "on")


class Unit:
    """`values` holds the assignments of each `Section.Key` in order; an empty assignment clears those before it."""

    # A dataclass would take longer to import than a program here runs.
    def __init__(
        self,
        name: str,
        load: str = "not-found",
        fragment: str = "",
        drop_ins: list[str] | None = None,
        values: dict[str, list[str]] | None = None,
    ) -> None:
        self.name = name
        self.load = load
        self.fragment = fragment
        self.drop_ins = drop_ins or []
        self.values = values or {}

    def all(self, key: str) -> list[str]:
        return self.values.get(key, [])

    def words(self, key: str) -> list[str]:
        return [word for value in self.all(key) for word in value.split()]

    def last(self, key: str, otherwise: str = "") -> str:
        return self.all(key)[-1] if self.all(key) else otherwise

    def flag(self, key: str) -> bool:
        return self.last(key).lower() in _FLAGS


def load(name: str) -> Unit:
    """Return the unit as its files have it now."""
    unit = Unit(name)
    fragment = next((path for folder in FOLDERS if os.path.lexists(path := f"{folder}/{name}")), None)
    if fragment is None:
        return unit
    unit.fragment = os.path.realpath(fragment)
    if unit.fragment == "/dev/null":
        unit.load = "masked"
        return unit
    unit.name = os.path.basename(unit.fragment)
    unit.load = "loaded"
    unit.drop_ins = _drop_ins({name, unit.name})
    for path in (unit.fragment, *unit.drop_ins):
        _parse(Path(path).read_text(), unit.values)
    return unit


def _drop_ins(names: set[str]) -> list[str]:
    by_name: dict[str, str] = {}
    for folder in FOLDERS:
        for name in names:
            for path in sorted(Path(folder, f"{name}.d").glob("*.conf")):
                by_name.setdefault(path.name, str(path))
    return [by_name[name] for name in sorted(by_name)]


def _parse(text: str, values: dict[str, list[str]]) -> None:
    section = ""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif line and line[0] not in "#;" and "=" in line:
            key, _, value = line.partition("=")
            name = f"{section}.{key.strip()}"
            if value.strip():
                values.setdefault(name, []).append(value.strip())
            else:
                values[name] = []


def unload_if_transient(systemd: dict[str, Any], unit: Unit) -> None:
    """Forget a transient unit that has become inactive, and its file; `systemd` is the manager's state."""
    # systemd-run writes all properties into one section here.
    gone = ("inactive", "failed") if unit.last("Service.CollectMode") == "inactive-or-failed" else ("inactive",)
    if unit.fragment.startswith(TRANSIENT) and systemd["units"].get(unit.name, {}).get("active") in gone:
        Path(unit.fragment).unlink(missing_ok=True)
        systemd["units"].pop(unit.name, None)
        systemd.get("loaded", {}).pop(unit.name, None)


def to_state(unit: Unit) -> dict[str, Any]:
    return dict(vars(unit))


def wanted_by(unit: Unit) -> list[tuple[str, str]]:
    """Return (link, target) of what `enable` makes."""
    links = []
    for key, folder in (("Install.WantedBy", "wants"), ("Install.RequiredBy", "requires")):
        links += [(f"{FOLDERS[0]}/{target}.{folder}/{unit.name}", unit.fragment) for target in unit.words(key)]
    return links + [(f"{FOLDERS[0]}/{alias}", unit.fragment) for alias in unit.words("Install.Alias")]


def file_state(unit: Unit) -> str:
    """Return the state that `systemctl is-enabled` prints; empty where there is no such file."""
    if unit.load != "loaded":
        return "masked" if unit.load == "masked" else ""
    links = wanted_by(unit)
    if any(os.path.lexists(link) for link, _ in links):
        return "enabled"
    if any(Path(FOLDERS[1]).glob(f"*.wants/{unit.name}")):
        return "enabled-runtime"
    return "disabled" if links else "static"
