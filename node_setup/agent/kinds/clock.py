"""The Amazon Time Sync Service as chrony's preferred source, in a file in the folder that the distribution's chrony reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import Facts, Remark, Request, Run, Setting, Step

ON_EC2 = ("imds", "dmi", "hyperpod")
"""Only an EC2 instance has these sources in facts.instance: the service's link-local address answers nowhere else."""

FOLDERS = (("family", "debian", owned.CHRONY), ("id", "amzn", owned.CHRONY_AL))
"""Each row names a fact of facts.os: a system with it has a chrony.conf which reads the folder as a `sourcedir` unless an
administrator changed it; other systems have none."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    settings = [setting for setting in chosen if setting.id in selected]
    system = facts.get("os") or {}
    path = next((path for key, value, path in FOLDERS if system.get(key) == value), None)
    reason = _not_here(facts, path)
    if reason or path is None:
        return [Remark(setting.id, *(reason or (Status.SKIPPED, ""))) for setting in settings]
    unread = _unread(facts, path)
    if unread and chosen:
        return [Remark(setting.id, *unread) for setting in settings]
    file = OwnedLines(path, after=(Run(("chronyc", "reload", "sources"), 10.0),))
    planned = file.plan({setting.id: _line(setting) for setting in chosen}, selected, facts, request)
    source = (facts.get("time") or {}).get("source")
    why = f"in place; chrony's source is {source}" if source else "in place; chrony has chosen no source yet"
    return with_ok(planned, chosen, selected, {setting.id: source for setting in chosen}, why)


def _unread(facts: Facts, path: str) -> tuple[Status, str] | None:
    """Return status and reason where chrony does not read the file's folder: chrony knows `sourcedir` since 4.0, and Ubuntu
    20.04 has 3.5."""
    folder = str(PurePosixPath(path).parent)
    folders = (facts.get("time") or {}).get("folders")
    if folders is None:
        return Status.UNKNOWN, "chrony.conf could not be read, so it is not known whether chrony would read our file"
    if folder in folders:
        return None
    why = f"chrony.conf has no `sourcedir {folder}`, so that chrony reads no file there; fix: add it, if chrony is 4.0 or newer"
    return (Status.CONFLICT if (facts.get("files") or {}).get(path) else Status.SKIPPED), why


def _line(setting: Setting) -> str:
    return f"server {setting.value} {setting.options['flags']}"


def _not_here(facts: Facts, path: str | None) -> tuple[Status, str] | None:
    instance: Mapping[str, Any] = facts.get("instance") or {}
    if instance.get("source") not in ON_EC2:
        return Status.SKIPPED, "not an EC2 instance: Amazon's time service answers nowhere else"
    services = facts.get("services")
    if services is None:
        return Status.UNKNOWN, "systemd did not answer whether chrony is installed"
    if not any((services.get(f"{name}.service") or {}).get("load") == "loaded" for name in ("chrony", "chronyd")):
        return Status.SKIPPED, "chrony is not installed"
    return None if path else (Status.SKIPPED, "this distribution's chrony reads no folder of sources")
