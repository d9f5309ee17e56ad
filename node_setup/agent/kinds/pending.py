"""Programs that a killed apply had still to run, so that its files take effect."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.model import PERSISTED, Facts, Remark, Request, Run, Setting, Step

Command = tuple[str, ...]

TAKE_IN: tuple[Command, ...] = (
    ("systemctl", "daemon-reload"),
    ("chronyc", "reload", "sources"),
    ("update-grub",),
)
"""Running these once more does no harm, so they may be run because a note says so; whatever else follows a file, the facts show
again."""

SECONDS = 120.0
"""update-grub looks at every kernel and disk."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    return [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts)]


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    steps: list[Step | Remark] = [
        Step(
            setting.id, PERSISTED, " ".join(command), "interrupted before this command", "run", (Run(command, SECONDS),)
        )
        for command in noted_commands(facts)
    ]
    return steps or [Remark(setting.id, Status.OK, "no earlier apply was interrupted")]


def noted_commands(facts: Facts) -> list[Command]:
    """Return the commands noted on this node, in the order of `TAKE_IN`; a note in another form names none."""
    note = (facts.get("files") or {}).get(owned.PENDING)
    try:
        noted = json.loads(note["content"]) if note else []
    except ValueError:
        noted = []
    return [command for command in TAKE_IN if isinstance(noted, list) and list(command) in noted]
