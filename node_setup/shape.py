"""What an answer must hold before a report is made of it: another program's JSON, or half of ours, says nothing of a node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from node_setup.agent.answer import VERSION
from node_setup.agent.model import EXIT_DRIFT, EXIT_IN_SYNC

DEEPEST = 32
"""Levels of an answer; ours have fewer than ten. Far more than these, and it cannot be written out again."""


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _entries(*texts: str) -> Callable[[Any], bool]:
    """A list of tables, each with these texts."""

    def check(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(one, dict) and all(isinstance(one.get(name), str) for name in texts) for one in value
        )

    return check


_PARTS: Mapping[tuple[str, ...], Callable[[Any], bool]] = {
    ("rows",): _entries("setting", "status", "why"),
    ("errors",): _entries("where", "why"),
    ("lint",): _entries("harm", "name", "value", "where", "why", "fix"),
    ("results",): _entries("check", "status", "why"),
    ("reboot",): _is_list,
    ("unplanned",): _is_list,
    ("boot",): _is_table,
    ("facts_digest",): _is_table,
    ("ready",): _is_flag,
    ("jobs",): _is_list,
    ("gpu", "devices"): _is_list,
    ("efa", "devices"): _is_list,
    ("lustre", "mounts"): _is_list,
    ("memory", "gib"): _is_finite,
}
"""What reports take apart, wherever it is in an answer and not null."""
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "facts": ("agent", "host", "kernel"),
    "plan": ("agent", "rows"),
    "tune": ("agent", "rows"),
    "verify": ("results", "facts_digest", "ready"),
    "reboot-check": ("agent", "boot"),
}
"""What each command says when it got to its end; where it failed there may be errors alone."""


def flaw(command: str, status: int, result: Mapping[str, Any], sha: str) -> str | None:
    """Why this is no answer to `command` of the agent with this SHA-256; None where it is one."""
    return next(_flaws(command.partition(" ")[0], status, result, sha), None)


def _flaws(command: str, status: int, result: Mapping[str, Any], sha: str) -> Iterator[str]:
    if _is_deep(result):
        yield f"it has more than {DEEPEST} levels"
        return
    if result.get("version") != VERSION:
        yield f"its version is {result.get('version')!r}, not {VERSION}"
    told = result.get("agent")
    told = told.get("sha256") if isinstance(told, dict) else told
    if "agent" in result and told != sha:
        yield f"it is of agent {told!r}, not of {sha}"
    if status in (EXIT_IN_SYNC, EXIT_DRIFT):
        for name in _NEEDED.get(command, ()):
            if result.get(name) is None:
                yield f"it has no {name}"
    for path, check in _PARTS.items():
        value = _at(result, path)
        if value is not None and not check(value):
            yield f"its {'.'.join(path)} has another form"


def _at(result: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = result
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        tables = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [inner for table in tables for inner in table]
        if not level:
            return False
    return True
