"""systemd units that must run, now and after a boot; one that is not installed is skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lustrain.status import Status
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import PERSISTED, RUNTIME, Facts, Remark, Request, Run, Setting, Step

ENABLED = ("enabled", "alias", "static", "indirect", "generated")
"""`systemctl is-enabled` prints these for a unit that is enabled, or started by another one that is."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    planned = [line for setting in chosen if setting.id in selected for line in _unit(setting, facts)]
    return with_ok(planned, chosen, selected, dict.fromkeys((setting.id for setting in chosen), "enabled, active"))


def _unit(setting: Setting, facts: Facts) -> list[Step | Remark]:
    missing = no_systemd(facts)
    if missing:
        return [Remark(setting.id, *missing)]
    unit: Mapping[str, Any] = facts["services"].get(setting.key) or {}
    if unit.get("load") == "masked" or unit.get("enabled") == "masked":
        return [
            Remark(
                setting.id, Status.SKIPPED, f"{setting.key} is masked; fix: systemctl unmask {setting.key}", "masked"
            )
        ]
    if unit.get("load") != "loaded":
        return [Remark(setting.id, Status.SKIPPED, f"{setting.key} is not installed")]
    steps: list[Step | Remark] = []
    if unit.get("enabled") not in ENABLED:
        steps.append(_step(setting, PERSISTED, unit.get("enabled"), "enabled", "enable"))
    if unit.get("active") not in ("active", "activating", "reloading"):
        steps.append(_step(setting, RUNTIME, unit.get("active"), "active", "start"))
    return steps


def _step(setting: Setting, part: str, current: str | None, wanted: str, verb: str) -> Step:
    return Step(setting.id, part, setting.key, current, wanted, (Run(("systemctl", verb, setting.key)),))


def no_systemd(facts: Facts) -> tuple[Status, str] | None:
    """Return a status and the reason where the state of units cannot be read."""
    if facts.get("init") not in ("systemd", None):
        return Status.SKIPPED, "systemd does not run here"
    if facts.get("init") is None or facts.get("services") is None:
        return Status.UNKNOWN, "systemd did not answer"
    return None
