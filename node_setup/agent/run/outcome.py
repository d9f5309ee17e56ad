"""The result of an apply, judged by the plan made from facts read again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lustrain.status import Status
from node_setup.agent.model import PERSISTED, Action, Facts, Remark, Run, Step
from node_setup.agent.run.apply import Key, key
from node_setup.agent.run.plan import Plan, rows

Row = dict[str, Any]
_RUNNING = ("active", "reloading")


@dataclass(frozen=True)
class Changes:
    """This is what an apply did: `steps` of all rounds, `troubles`, a line for each failed step. `known` are the remarks of the
    plan before; `stopped_services` are units that ran before, each with its state now."""

    steps: tuple[Step, ...] = ()
    troubles: Mapping[Key, str] = field(default_factory=dict)
    known: tuple[Remark, ...] = ()
    stopped_services: Mapping[str, str] = field(default_factory=dict)


def result_rows(done: Changes, after: Plan) -> list[Row]:
    """Return a row for each step that was done, with its result, and one for each other line of the plan afterwards."""
    verdicts = {key(step): _verdict(step, done, after) for step in done.steps}
    statuses: dict[str, set[Status]] = {}
    for step in done.steps:
        statuses.setdefault(step.setting, set()).add(verdicts[key(step)][0])
    rest = tuple(
        remark for remark in after.remarks if not _is_reported(remark, statuses.get(remark.setting, set()), done)
    )
    left = {key(step): step for step in after.steps}
    made = rows(replace(after, steps=done.steps, remarks=rest))
    for row in made:
        name = (row["setting"], row["part"], row["target"])
        if name in verdicts:
            row["status"], why = verdicts[name]
            row["why"] = why or row["why"]
            row["found"] = left[name].current if name in left else row["found"]
    return made


def stopped_services(before: Facts, after: Facts) -> dict[str, str]:
    """Return the units that ran before and no longer do, by name, with their state. Nothing else may show it: of a daemon that
    is gone no limit is too low, and what only counts when it starts is in place."""
    now: Mapping[str, Any] = after.get("services") or {}
    ran = [name for name, unit in (before.get("services") or {}).items() if unit["active"] in _RUNNING]
    return {name: now[name]["active"] for name in ran if name in now and now[name]["active"] not in _RUNNING}


def enabled_by_earlier_step(step: Step, before: Plan) -> bool:
    """Check that an earlier step made this one possible, such as a parameter of a client that had not been mounted: its setting
    did not apply before, or a mount that was made anew lost it. Another step of a setting that was examined before is not part
    of the plan."""
    in_order = {remark.setting for remark in before.remarks if remark.status == Status.OK}
    examined = in_order | {step.setting for step in before.steps}
    lost = _runs(step, "lctl") and any(_runs(earlier, "umount") for earlier in before.steps)
    return lost or step.setting not in examined


def _runs(step: Step, program: str) -> bool:
    return any(isinstance(action, Run) and action.command[0] == program for action in step.actions)


def unplanned_changes(done: Changes, after: Plan) -> list[str]:
    """Return what differs after the apply though no step changes it."""
    done_keys = {key(step) for step in done.steps}
    return [
        f"{step.setting} ({step.part}) {step.target} is {step.current}, wanted {step.wanted}"
        for step in after.steps
        if key(step) not in done_keys
    ]


def blocking_settings(made: Iterable[Row]) -> list[str]:
    """Return settings without which a node may take no jobs, and which are not known to be in effect and to stay so."""
    bad = (Status.FAILED, Status.CONFLICT, Status.UNKNOWN)
    return list(dict.fromkeys(row["setting"] for row in made if row["severity"] == "must" and row["status"] in bad))


def reboot_reasons(made: Iterable[Row]) -> list[str]:
    return [f"{row['setting']}: {row['why']}" for row in made if row["status"] == Status.REBOOT]


def _verdict(step: Step, done: Changes, after: Plan) -> tuple[Status, str]:
    """Return status and reason; an empty reason leaves the setting's own."""
    trouble = done.troubles.get(key(step))
    before_it = f"{trouble}; " if trouble else ""
    gone = next(
        (unit for action in step.actions for unit in _restarted_units(action) if unit in done.stopped_services), None
    )
    if gone is not None:
        return (
            Status.FAILED,
            f"{before_it}{gone} ran before and is {done.stopped_services[gone]} now; fix: journalctl -u {gone}",
        )
    left = next((again for again in after.steps if key(again) == key(step)), None)
    if left is not None:
        return Status.FAILED, f"{before_it}it is {left.current} now, wanted {left.wanted}"
    for remark in after.remarks:
        if remark.setting != step.setting or remark in done.known:
            continue
        if remark.status in (Status.FAILED, Status.UNKNOWN):
            return Status.FAILED, f"{before_it}it cannot be read back: {remark.why}"
        if remark.status == Status.REBOOT and step.part == PERSISTED:
            return Status.REBOOT, remark.why
    if step.needs and step.part == PERSISTED:
        return Status.REBOOT, f"in place, in effect after: {step.needs}"
    return Status.CHANGED, f"as wanted, though {trouble}" if trouble else ""


def _restarted_units(action: Action) -> tuple[str, ...]:
    """Return the unit that an action starts anew."""
    if isinstance(action, Run) and action.command[:2] == ("systemctl", "restart"):
        return tuple(action.command[2:])
    return ()


def _is_reported(remark: Remark, statuses: set[Status], done: Changes) -> bool:
    """Check whether the rows of a setting's steps report this already: all is well now, or why one failed or waits."""
    if remark.status == Status.OK:
        return bool(statuses)
    if remark in done.known:
        return False
    if remark.status == Status.REBOOT:
        return Status.REBOOT in statuses
    return remark.status in (Status.FAILED, Status.UNKNOWN) and Status.FAILED in statuses
