"""Session limits (pam_limits): a soft and a hard line for every user, and for root, which `*` leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from posixpath import basename
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.compare import satisfies
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import Facts, Remark, Request, Setting, Step

FILE = OwnedLines(owned.LIMITS)
DOMAINS = ("*", "root")


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    planned = FILE.plan({setting.id: _lines(setting) for setting in chosen}, selected, facts, request)
    planned += [remark for setting in chosen if setting.id in selected for remark in _conflict(setting, facts)]
    return with_ok(planned, chosen, selected, {}, "in place; a session's limits are set when it begins")


def _lines(setting: Setting) -> str:
    kinds = ("soft", "hard")
    return "\n".join(f"{domain} {kind} {setting.key} {setting.value}" for domain in DOMAINS for kind in kinds)


def _conflict(setting: Setting, facts: Facts) -> list[Remark]:
    """Find a line that wins over ours: of a file read later, or for a user or group, which pam_limits takes before `*`."""
    limits: Mapping[str, Any] = facts.get("limits") or {}
    for file in limits.get("files") or ():
        if file["path"] == owned.LIMITS:
            continue
        later = file["path"].startswith("/etc/security/limits.d/") and basename(file["path"]) > basename(owned.LIMITS)
        for domain, kind, item, value in file["lines"]:
            wins = later or domain not in DOMAINS
            if item == setting.key and wins and not satisfies(_endless(value), setting.value, "at-least"):
                why = f"{file['path']} wins with `{domain} {kind} {item} {value}`; fix: take the line out of it"
                return [Remark(setting.id, Status.CONFLICT, why, value, setting.value)]
    return []


def _endless(value: str) -> str:
    return "unlimited" if value == "-1" else value
