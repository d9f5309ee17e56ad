"""Parameters of a mounted Lustre client. An unmount resets them, so the agent sets them again at each boot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lustrain.status import Status
from node_setup.agent.kinds.compare import satisfies
from node_setup.agent.kinds.lustre.mount import lustre_mounts
from node_setup.agent.model import RUNTIME, Facts, Remark, Request, Run, Setting, Step

RPCS, CHANGING_RPCS = "mdc.*.max_rpcs_in_flight", "mdc.*.max_mod_rpcs_in_flight"
"""The client takes no value of the second that is not below the first, so the order of the two matters
(lustre-release lustre/obdclass/genops.c, obd_set_max_rpcs_in_flight and obd_set_max_mod_rpcs_in_flight)."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan one `lctl set_param` for each pattern of which any instance differs; `Setting.key` is the pattern."""
    settings = _ordered([setting for setting in chosen if setting.id in selected], facts)
    if settings and not lustre_mounts(facts):
        why = "no Lustre file system is mounted, and an unmount resets these values"
        return [Remark(setting.id, Status.SKIPPED, why, wanted=setting.value) for setting in settings]
    return [_against(setting, _instances(setting.key, facts), _rival(setting, settings, facts)) for setting in settings]


def _against(setting: Setting, instances: Mapping[str, str] | None, rival: str) -> Step | Remark:
    if instances is None:
        return Remark(
            setting.id, Status.UNKNOWN, f"lctl get_param {setting.key} could not be read", wanted=setting.value
        )
    if not instances:
        return Remark(setting.id, Status.SKIPPED, f"this client has no parameter {setting.key}", wanted=setting.value)
    values = sorted(set(instances.values()))
    shown = ", ".join(values)
    if all(satisfies(value, setting.value, setting.compare) for value in values):
        where = "the only instance" if len(instances) == 1 else f"all {len(instances)} instances"
        return Remark(setting.id, Status.OK, f"on {where}; set again at each boot", shown, setting.value)
    if rival:
        return Remark(setting.id, Status.CONFLICT, rival, shown, setting.value)
    return _step(setting, shown)


def _step(setting: Setting, current: str) -> Step:
    command = ("lctl", "set_param", f"{setting.key}={setting.value}")
    return Step(setting.id, RUNTIME, setting.key, current, setting.value, (Run(command),))


def _instances(pattern: str, facts: Facts) -> Mapping[str, str] | None:
    instances: Mapping[str, str] | None = ((facts.get("lustre") or {}).get("parameters") or {}).get(pattern)
    return instances


def _ordered(settings: list[Setting], facts: Facts) -> list[Setting]:
    """Return the settings in their order, but of the two that depend on each other first the one that makes room for the
    other."""
    by_key = {setting.key: setting for setting in settings}
    if RPCS not in by_key or CHANGING_RPCS not in by_key:
        return settings
    largest = _largest(RPCS, facts)
    lowered = largest is not None and _number(by_key[RPCS].value, 0) < largest
    pair = [CHANGING_RPCS, RPCS] if lowered else [RPCS, CHANGING_RPCS]
    places = iter(pair)
    return [by_key[next(places)] if setting.key in pair else setting for setting in settings]


def _rival(setting: Setting, settings: Sequence[Setting], facts: Facts) -> str:
    """Return why the client would refuse this value beside the other parameter's; empty if it would not. The other's value is
    the one that it is about to get, else the one that it has."""
    if setting.key not in (RPCS, CHANGING_RPCS):
        return ""
    key = CHANGING_RPCS if setting.key == RPCS else RPCS
    coming = [_number(setting.value, 0) for setting in settings if setting.key == key]
    others, own = coming or _numbers(key, facts), _number(setting.value, 0)
    if all(other < own if key == CHANGING_RPCS else own < other for other in others):
        return ""
    relation = "above" if key == CHANGING_RPCS else "below"
    shown = ", ".join(str(other) for other in sorted(set(others)))
    return f"{setting.key} = {setting.value} must stay {relation} {key} = {shown}; fix: change one of the two"


def _largest(pattern: str, facts: Facts) -> int | None:
    return max(_numbers(pattern, facts), default=None)


def _numbers(pattern: str, facts: Facts) -> list[int]:
    return [int(value) for value in (_instances(pattern, facts) or {}).values() if value.isdigit()]


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isdigit() else otherwise
