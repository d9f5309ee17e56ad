"""systemd units that the agent writes whole, has systemd read, and enables."""

from __future__ import annotations

from collections.abc import Mapping

from node_setup.agent.model import PERSISTED, Action, Facts, Run, Setting, Step, Write


def in_place(setting: Setting, wanted: Mapping[str, str], enabled: str, facts: Facts) -> Step | None:
    """Plan to write the files `wanted` (content by path, each with its fact) and to enable the one at `enabled`; the step is
    named after the first of them. None where nothing is to be done."""
    files, unit = facts["files"], name(enabled)
    stale = [path for path, content in wanted.items() if files[path] is None or files[path]["content"] != content]
    service: Mapping[str, object] = (facts.get("services") or {}).get(unit) or {}
    if not stale and service.get("enabled") == "enabled":
        return None
    current = "missing" if all(files[path] is None for path in wanted) else "not enabled" if not stale else "differs"
    writes: tuple[Action, ...] = tuple(Write(path, wanted[path]) for path in stale)
    follow = (Run(("systemctl", "daemon-reload")), Run(("systemctl", "enable", unit)))
    return Step(setting.id, PERSISTED, next(iter(wanted)), current, "as planned, enabled", (*writes, *follow))


def name(path: str) -> str:
    """Return the unit's name in a unit file's path."""
    return path.rsplit("/", 1)[1]
