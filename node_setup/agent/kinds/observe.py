"""Facts that are only reported, beside the usual value; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.status import Status
from node_setup.agent.kinds.compare import satisfies
from node_setup.agent.model import Facts, Remark, Request, Setting, Step, format_value, look_up


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    return [_look(setting, facts) for setting in chosen if setting.id in selected]


def _look(setting: Setting, facts: Facts) -> Remark:
    fact = look_up(facts, setting.key)[1]
    if fact is None:
        return Remark(setting.id, Status.UNKNOWN, f"{setting.key} could not be read")
    text = format_value(fact)
    if not setting.value or satisfies(text, setting.value, setting.compare):
        return Remark(setting.id, Status.OK, f"{setting.key} is {text}", text, setting.value or None)
    relation = {"exact": "", "at-least": "at least ", "at-most": "at most "}[setting.compare]
    why = f"{setting.key} is {text}, usual is {relation}{setting.value}; reported only"
    return Remark(setting.id, Status.SKIPPED, why, text, setting.value)
