"""The settings: read from the packed tables, checked strictly, with the facts they need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from lustrain.problem import UserError, did_you_mean, problem
from node_setup.agent import owned
from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.kinds import KINDS
from node_setup.agent.model import Setting
from node_setup.agent.settings import allowed, condition, data

PROFILES = ("efa-gpu", "gaudi", "cpu", "login")
COMPARISONS = ("exact", "at-least", "at-most")
SEVERITIES = ("must", "should")
NEEDS = ("", "reboot", "remount", "restart of slurmd")
_TEXT = ("id", "kind", "reason", "source", "key", "value", "compare", "severity", "needs", "allowed")
_REQUIRED = ("id", "kind", "profiles", "reason", "source")
_KEYS = (*_TEXT, "profiles", "when", "default", "options", "value_per")

_ID = re.compile(r"[\w.*+-]+\Z")
"""Files of many settings can hold such an id as the mark of a setting's lines (`kinds.owned_lines`)."""

_VALUED = (
    "module-option",
    "sysctl",
    "limit",
    "slurmd-limit",
    "kernel-argument",
    "lustre-parameter",
    "clock",
    "metrics-timer",
)
_KEYED = (*_VALUED[:-2], "module-load", "unit", "observe")
_OPTIONS = {"file": ("path", "lines"), "hold": ("packages",), "clock": ("flags",)}
"""Each kind needs these options."""

SERVICES = (
    "slurmd.service",
    "chrony.service",
    "chronyd.service",
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "configure-efa-fsx-lustre-client.service",
    "unattended-upgrades.service",
    "dlami-nvme.service",
)
"""Kinds and checks read these units without a setting that names them."""
FSTAB = "/etc/fstab"
"""An administrator may have named a mount point here that would be ours."""


@cache
def load() -> tuple[Setting, ...]:
    """Return every setting of the packed agent or of the checkout. UserError where the tables are not right."""
    return parse(data.tables())


def parse(tables: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the settings of all tables that have any (others hold other data), files in the order of their names.

    UserError with a line for each mistake.
    """
    problems: list[str] = []
    settings: list[Setting] = []
    for stem in sorted(tables):
        if "setting" not in tables[stem]:
            continue
        problems += [problem(f"{stem}.toml: {key}", "…", "unknown table") for key in tables[stem] if key != "setting"]
        for number, table in enumerate(tables[stem]["setting"], 1):
            where = f"{stem}.toml: {table.get('id') or f'setting {number}'}"
            wrong = list(_mistakes(where, table))
            problems += wrong
            if not wrong:
                settings.append(_setting(table))
    problems += _duplicates(settings)
    if problems:
        raise UserError(problems)
    return tuple(settings)


def _setting(table: Mapping[str, Any]) -> Setting:
    fields = {**table, "profiles": tuple(table["profiles"]), "when": tuple(table.get("when", ()))}
    if "value_per" in table:
        fields["value_per"] = (table["value_per"]["fact"], float(table["value_per"]["times"]))
    return Setting(**fields)


def _duplicates(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield ids that stand twice, and two settings for the same key of the same kind."""
    ids: set[str] = set()
    keys: dict[tuple[str, str], str] = {}
    for setting in settings:
        if setting.id in ids:
            yield problem("setting.id", setting.id, "is there twice")
        ids.add(setting.id)
        other = keys.setdefault((setting.kind, setting.key), setting.id) if setting.key else setting.id
        if other != setting.id:
            yield problem(f"{setting.id}.key", setting.key, f"{other} has the same {setting.kind}")


def _mistakes(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    for key in table:
        if key not in _KEYS:
            yield problem(f"{where}.{key}", table[key], "unknown key", fix=did_you_mean(key, _KEYS))
        elif key in _TEXT and not isinstance(table[key], str):
            yield problem(f"{where}.{key}", table[key], "wrong type", allowed="text in quotes")
    for key in _REQUIRED:
        if not table.get(key):
            yield f"{where}.{key} is missing: it has no default; fix: add it"
    yield from _missing_of_kind(where, table)
    yield from _wrong_shapes(where, table)
    yield from _wrong_names(where, table)
    yield from _wrong_value(where, table)


def _missing_of_kind(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    kind, options = table.get("kind"), table.get("options", {})
    lacks = ["key"] if kind in _KEYED and not table.get("key") else []
    if kind in _VALUED and not table.get("value") and "value_per" not in table:
        lacks.append("value")
    if isinstance(options, Mapping) and isinstance(kind, str):
        lacks += [f"options.{name}" for name in _OPTIONS.get(kind, ()) if name not in options]
    for name in lacks:
        yield f"{where}.{name} is missing: a {kind} needs it; fix: add it"


def _wrong_shapes(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    for key in ("profiles", "when"):
        if not _is_texts(table.get(key, [])):
            yield problem(f"{where}.{key}", table[key], "wrong type", allowed="a list of texts")
    if not isinstance(table.get("default", True), bool):
        yield problem(f"{where}.default", table["default"], "wrong type", allowed="true, false")
    if not isinstance(table.get("options", {}), Mapping):
        yield problem(f"{where}.options", table["options"], "wrong type", allowed="a table")


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def _wrong_names(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(table.get("id"), str) and table["id"] and not _ID.match(table["id"]):
        yield problem(f"{where}.id", table["id"], "not an id", allowed="letters, digits, and . _ * + - without spaces")
    names = {"kind": tuple(KINDS), "compare": COMPARISONS, "severity": SEVERITIES, "needs": NEEDS}
    for key, known in names.items():
        if isinstance(table.get(key), str) and table[key] and table[key] not in known:
            yield problem(f"{where}.{key}", table[key], "unknown", allowed=", ".join(filter(None, known)))
    if _is_texts(table.get("profiles")):
        for profile in table["profiles"]:
            if profile not in PROFILES:
                yield problem(f"{where}.profiles", profile, "unknown", allowed=", ".join(PROFILES))
    if _is_texts(table.get("when")):
        for text in table["when"]:
            try:
                condition.parse(text)
            except ValueError as error:
                yield problem(f"{where}.when", text, str(error))


def _wrong_value(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    rule, value, per = table.get("allowed", "text"), table.get("value", ""), table.get("value_per")
    if per is not None and value:
        yield problem(f"{where}.value", value, "value_per is given too", fix="remove one of the two")
    if per is not None and not _is_formula(per):
        yield problem(f"{where}.value_per", per, "not a formula", allowed='{fact = "cpu.count", times = 100}')
    if not isinstance(rule, str) or not allowed.is_rule(rule):
        yield problem(
            f"{where}.allowed", rule, "not a rule", allowed="integer, integer >= a, integer a..b, one of x, y, text"
        )
    elif isinstance(value, str) and value and not allowed.accepts(rule, value):
        yield problem(f"{where}.value", value, "does not fit `allowed`", allowed=rule)


def _is_formula(per: Any) -> bool:
    if not isinstance(per, Mapping) or sorted(per) != ["fact", "times"]:
        return False
    return (
        isinstance(per["fact"], str) and isinstance(per["times"], (int, float)) and not isinstance(per["times"], bool)
    )


def wanted_facts(settings: Iterable[Setting], document: Mapping[str, Any]) -> Wanted:
    """Return what has to be read on a node so that these settings can be planned for it."""
    settings = list(settings)
    keys: dict[str, list[str]] = {}
    for setting in settings:
        keys.setdefault(setting.kind, []).append(setting.key)
    named = [condition.parse(text).path for setting in settings for text in setting.when]
    lustre = document.get("lustre") or {}
    return Wanted(
        sysctls=_unique(keys.get("sysctl", []), _below("sysctl.", named)),
        module_parameters=_unique(keys.get("module-option", []), _below("modules.parameters.", named)),
        lustre_parameters=_unique(keys.get("lustre-parameter", [])),
        stripe_paths=_unique(stripe["path"] for stripe in lustre.get("stripes", ())),
        services=_unique(
            SERVICES,
            keys.get("unit", []),
            _options(settings, "services"),
            _below("services.", named),
            _automount(document),
        ),
        packages=_unique(_options(settings, "packages"), _below("packages.installed.", named)),
        mount_units=_mount_units(settings, document),
    )


def _mount_units(settings: Sequence[Setting], document: Mapping[str, Any]) -> tuple[str, ...]:
    points = [s.options["path"] for s in settings if s.kind == "scratch" and "path" in s.options]
    lustre = document.get("lustre") or {}
    if document.get("mount") and lustre.get("path"):
        points.append(lustre["path"])
    units = [owned.mount_unit(point, suffix) for point in points for suffix in ("mount", "automount")]
    return _unique(units, [FSTAB] if document.get("mount") else [])


def _automount(document: Mapping[str, Any]) -> list[str]:
    """Return the unit that mounts Lustre when it is first used, where mounting it is up to us."""
    path = (document.get("lustre") or {}).get("path")
    return [owned.mount_unit(path, "automount").rpartition("/")[2]] if path and document.get("mount") else []


def _options(settings: Iterable[Setting], name: str) -> Iterator[str]:
    for setting in settings:
        yield from setting.options.get(name, ())


def _below(prefix: str, paths: Iterable[str]) -> Iterator[str]:
    return (path[len(prefix) :] for path in paths if path.startswith(prefix))


def _unique(*many: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in many for name in names if name))
