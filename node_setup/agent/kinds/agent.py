"""The agent itself: its copy on the node, the cluster's document, and the unit that applies it at boot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.group import group_of
from node_setup.agent.model import PERSISTED, Action, Copy, Facts, Remark, Request, Run, Setting, Step, Write

UNIT = PurePosixPath(owned.BOOT_UNIT).name
BOOT_UNIT = f"""{owned.HEADER}[Unit]
Description=Brings this node to the state that its cluster wants
Wants=network-online.target
After=network-online.target remote-fs.target nvidia-persistenced.service
After=configure-efa-fsx-lustre-client.service lustrain-boot.service
Before=slurmd.service
StartLimitIntervalSec=2h
StartLimitBurst=5

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/python3 -I -S {owned.AGENT} boot
TimeoutStartSec=900
Restart=on-failure
RestartSec=30

[Install]
WantedBy=multi-user.target
"""
"""No job comes before the first pass has ended; one that failed, as where the mount is late, is tried again some times.

systemd takes `Restart=on-failure` for a oneshot since 244 (its NEWS; Ubuntu 20.04 has 245, Amazon Linux 2023 252); what is
older has no Python 3.9 as /usr/bin/python3 either. `slurmd_limit` knows that slurmd is ordered after this unit.
"""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    return [line for setting in chosen if setting.id in selected for line in _plan(setting.id, facts, request)]


def _plan(setting: str, facts: Facts, request: Request) -> list[Step | Remark]:
    planned: list[Step | Remark] = [*_copy(setting, facts), *_document(setting, facts, request)]
    if facts.get("init") == "systemd":
        planned += _unit(setting, facts)
    elif facts.get("init") is None:
        planned.append(Remark(setting, Status.UNKNOWN, "what runs at boot could not be read"))
    else:
        planned.append(
            Remark(setting, Status.SKIPPED, "no systemd: whatever boots this node has to run the agent with `boot`")
        )
    return planned or [Remark(setting, Status.OK, "in place")]


def _copy(setting: str, facts: Facts) -> Iterator[Step]:
    """Return no step where the agent runs from a checkout, which is not a single file to copy."""
    agent = facts.get("agent") or {}
    running, installed, source = agent.get("sha256"), agent.get("installed"), agent.get("path")
    if running and source and running != installed:
        copy = Copy(source, owned.AGENT)
        yield Step(setting, PERSISTED, owned.AGENT, installed and installed[:12], running[:12], (copy,))


def _document(setting: str, facts: Facts, request: Request) -> Iterator[Step]:
    content = document_text(request, facts)
    current = _content(facts, owned.TUNING)
    if current != content:
        yield Step(
            setting,
            PERSISTED,
            owned.TUNING,
            _summary(current),
            _summary(content) or "",
            (Write(owned.TUNING, content),),
        )


def _unit(setting: str, facts: Facts) -> Iterator[Step]:
    current = _content(facts, owned.BOOT_UNIT)
    enabled = ((facts.get("services") or {}).get(UNIT) or {}).get("enabled") or "not enabled"
    if current == BOOT_UNIT and enabled == "enabled":
        return
    actions: list[Action] = [Run(("systemctl", "enable", UNIT))]
    if current != BOOT_UNIT:
        actions = [Write(owned.BOOT_UNIT, BOOT_UNIT), Run(("systemctl", "daemon-reload")), *actions]
    content = "missing" if current is None else "as planned" if current == BOOT_UNIT else "different content"
    yield Step(setting, PERSISTED, owned.BOOT_UNIT, f"{content}, {enabled}", "as planned, enabled", tuple(actions))


def document_text(request: Request, facts: Facts) -> str:
    """Return what the boot unit reads: the cluster's document and the node's group, the same bytes on every way to the node."""
    return json.dumps({**request.document, "group": group_of(facts, request)}, sort_keys=True, indent=1) + "\n"


def _content(facts: Facts, path: str) -> str | None:
    file = (facts.get("files") or {}).get(path)
    return None if file is None else str(file["content"])


def _summary(text: str | None) -> str | None:
    """Name a document by its cluster and group, as it is too long to show."""
    if text is None:
        return None
    try:
        document = json.loads(text)
        return f"cluster {document.get('cluster')}, group {document.get('group')}"
    except (ValueError, AttributeError):
        return "no document"
