"""Packages that must not be upgraded beside a running job, held by apt; only installed ones are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lustrain.status import Status
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import PERSISTED, Facts, Remark, Request, Run, Setting, Step

LOCKED = "locked by another process"
"""dpkg prints this while another process holds its lock, as apt's timers do after a first boot (dpkg lib/dpkg/dbmodify.c);
apt-mark has no option to wait for it."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan to hold `options.packages`: names, with a `*` at the end for all that begin so."""
    planned = [line for setting in chosen if setting.id in selected for line in _hold(setting, facts)]
    return with_ok(planned, chosen, selected, {}, "held")


def _hold(setting: Setting, facts: Facts) -> list[Step | Remark]:
    packages: Mapping[str, Any] = facts.get("packages") or {}
    if packages.get("manager") not in ("apt", None):
        return [Remark(setting.id, Status.SKIPPED, f"{packages['manager']} has no holds of its own")]
    if packages.get("manager") is None or packages.get("installed") is None or packages.get("held") is None:
        return [Remark(setting.id, Status.UNKNOWN, "the packages could not be read")]
    patterns = setting.options["packages"]
    names = sorted(name for name in packages["installed"] if any(fnmatchcase(name, pattern) for pattern in patterns))
    if not names:
        return [Remark(setting.id, Status.SKIPPED, f"none of {', '.join(patterns)} is installed")]
    loose = [name for name in names if name not in packages["held"]]
    if not loose:
        return []
    held = ", ".join(name for name in names if name in packages["held"]) or None
    hold = Run(("apt-mark", "hold", *loose), busy=LOCKED)
    return [Step(setting.id, PERSISTED, "apt-mark", held, ", ".join(names), (hold,))]
