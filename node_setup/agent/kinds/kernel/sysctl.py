"""Kernel parameters: written to /proc/sys now, and to a file in /etc/sysctl.d for the next boot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from posixpath import basename
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.compare import merge, satisfies
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import RUNTIME, Facts, Put, Remark, Request, Setting, Step

FILE = OwnedLines(owned.SYSCTL)


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    values = facts.get("sysctl")
    settings = [setting for setting in chosen if setting.id in selected]
    if values is None:
        return [
            Remark(setting.id, Status.UNKNOWN, f"{setting.key} could not be read", None, setting.value)
            for setting in settings
        ]
    planned: list[Step | Remark] = [
        Remark(setting.id, Status.SKIPPED, f"this kernel has no {setting.key}")
        for setting in settings
        if setting.key not in values
    ]
    present = [setting for setting in chosen if setting.key in values]
    planned += [
        step for setting in present if setting.id in selected for step in _runtime(setting, values[setting.key])
    ]
    lines = FILE.lines(facts)
    wanted = {
        setting.id: f"{setting.key} = {_at_boot(setting, values[setting.key], lines.get(setting.id), facts)}"
        for setting in present
    }
    planned += FILE.plan(wanted, selected, facts, request)
    planned += [remark for setting in present if setting.id in selected for remark in _conflict(setting, facts)]
    return with_ok(planned, present, selected, {setting.id: values[setting.key] for setting in present})


def _runtime(setting: Setting, current: str) -> list[Step]:
    if satisfies(current, setting.value, setting.compare):
        return []
    path = "/proc/sys/" + setting.key.replace(".", "/")
    value = merge(current, setting.value, setting.compare)
    return [Step(setting.id, RUNTIME, path, current, value, (Put(path, value),))]


def _at_boot(setting: Setting, running: str, line: str | None, facts: Facts) -> str:
    """Return the value that our file should hold. It is read after most others, and after the kernel chose its own default: an
    `at-least` line must not be lower than what it would replace; a line that is high enough stays as it is."""
    needed = setting.value
    for file in _foreign(facts):
        needed = merge(file["values"].get(setting.key, needed), needed, setting.compare)
    held = line.partition("=")[2].strip() if line else ""
    if held and satisfies(held, needed, setting.compare):
        return " ".join(held.split())
    return merge(running, needed, setting.compare)


def _conflict(setting: Setting, facts: Facts) -> list[Remark]:
    """Return a conflict where the last of the files that are read after ours sets a value that is not good enough."""
    later = [file for file in _after_ours(facts) if setting.key in file["values"]]
    if not later or satisfies(later[-1]["values"][setting.key], setting.value, setting.compare):
        return []
    path, value = later[-1]["path"], later[-1]["values"][setting.key]
    why = f"{path} is read after {owned.SYSCTL} and sets {setting.key} = {value}; fix: take the line out of it"
    return [Remark(setting.id, Status.CONFLICT, why, value, setting.value)]


def _foreign(facts: Facts) -> list[Mapping[str, Any]]:
    return [file for file in facts.get("sysctl_files") or () if file["path"] != owned.SYSCTL]


def _after_ours(facts: Facts) -> list[Mapping[str, Any]]:
    files = list(facts.get("sysctl_files") or ())
    for number, file in enumerate(files):
        if file["path"] == owned.SYSCTL:
            return files[number + 1 :]
    # systemd-sysctl sorts by file name across its folders (sysctl.d(5)), so it is known where ours will stand.
    return [file for file in files if basename(file["path"]) > basename(owned.SYSCTL)]
