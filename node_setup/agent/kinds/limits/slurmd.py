"""Limits of slurmd, which every step of a job inherits: a drop-in of its unit, and what the running slurmd has.

A slurmd with lower limits is restarted, as jobs begin with what it has; under a running job, which keeps its own limits
whatever happens to slurmd, that is left to the operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.compare import satisfies
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import RUNTIME, Facts, Remark, Request, Run, Setting, Step

RESTART = "restart of slurmd"
SLURMD = "slurmd.service"
BOOT = PurePosixPath(owned.BOOT_UNIT).name


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    running: Mapping[str, Any] = (facts.get("limits") or {}).get("slurmd") or {}
    short = [setting for setting in chosen if _too_low(setting, running)]
    waits = _waits(facts)
    needs = {setting.id: RESTART for setting in short} if waits else {}
    file = OwnedLines(owned.SLURMD, "[Service]\n", after=(Run(("systemctl", "daemon-reload")),), needs=needs)
    planned = file.plan(
        {setting.id: f"Limit{setting.key.upper()}={setting.value}" for setting in chosen}, selected, facts, request
    )
    stepped = {line.setting for line in planned}
    for setting in short:
        if setting.id in selected and not waits:
            planned.append(_restart(setting, running))
        elif setting.id in selected and setting.id not in stepped:
            why = f"slurmd runs with {setting.key} {_current(setting, running)}: {RESTART} {waits}"
            planned.append(Remark(setting.id, Status.REBOOT, why, _current(setting, running), setting.value))
    state = (_units(facts).get(SLURMD) or {}).get("active")
    idle = "has failed (journalctl -u slurmd)" if state == "failed" else "does not run"
    why = "as it should be" if running else f"in place; slurmd {idle}, and starts with it"
    return with_ok(planned, chosen, selected, {setting.id: _current(setting, running) for setting in chosen}, why)


def _waits(facts: Facts) -> str:
    """Return why slurmd is not restarted now; empty where nothing speaks against it."""
    if facts.get("jobs") != []:
        return "when no job runs" if facts.get("jobs") else "when it is known that no job runs"
    if (_units(facts).get(BOOT) or {}).get("active") == "activating":
        # slurmd is ordered after our boot unit: systemctl would wait for its end, and that unit, or its lock, for us.
        return f"when {BOOT} has ended, before which systemd starts no slurmd"
    active = (_units(facts).get(SLURMD) or {}).get("active")
    return "" if active == "active" else "by what started it, which is not systemd"


def _units(facts: Facts) -> Mapping[str, Any]:
    units: Mapping[str, Any] = facts.get("services") or {}
    return units


def _restart(setting: Setting, running: Mapping[str, Any]) -> Step:
    action = Run(("systemctl", "restart", SLURMD))
    return Step(setting.id, RUNTIME, SLURMD, _current(setting, running), setting.value, (action,))


def _current(setting: Setting, running: Mapping[str, Any]) -> str | None:
    pair = running.get(setting.key)
    return " ".join(pair) if pair else None


def _too_low(setting: Setting, running: Mapping[str, Any]) -> bool:
    pair = running.get(setting.key)
    return pair is not None and not all(satisfies(value, setting.value, setting.compare) for value in pair)
