"""Files that a killed apply wrote without running the programs that take them in."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.status import Status
from node_setup.agent import owed
from node_setup.agent.model import PERSISTED, Facts, Remark, Request, Run, Setting, Step

SECONDS = 120.0
"""update-grub looks at every kernel and disk."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    return [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts)]


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    steps: list[Step | Remark] = [
        Step(setting.id, PERSISTED, " ".join(command), "cut off before it", "run", (Run(command, SECONDS),))
        for command in owed.found(facts)
    ]
    return steps or [Remark(setting.id, Status.OK, "every file of an earlier apply was taken in")]
