"""The report of a run: for people a table and what needs attention, for programs one JSON object. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from lustrain.problem import DIFFERS, DONE, FAILED, UNREACHABLE, plain
from lustrain.status import Status
from lustrain.tables import table
from node_setup.agent.model import EXIT_DRIFT, EXIT_IN_SYNC, EXIT_REFUSED
from node_setup.answers import Answer, Finding, Row
from node_setup.fleet.faults import NOT_REACHED
from node_setup.fleet.pool import ANSWERED, Outcome

VERSION = 1
_SHOWN = (Status.CHANGE, Status.CHANGED, Status.FAILED, Status.CONFLICT, Status.REBOOT, Status.UNKNOWN)
_LONGEST = 160
_OPT_IN = "opt-in: "
_NOTHING = Answer(version=1)


def exit_code(outcomes: Iterable[Outcome], least: int = DONE) -> int:
    """Return the worst node's code: failed, refused or not begun, then not reached, then different from what is wanted or not
    ready. `least` is the code of what else the run did."""
    codes = {least, *(_code(outcome) for outcome in outcomes)}
    return next((code for code in (FAILED, UNREACHABLE, DIFFERS) if code in codes), DONE)


def _code(outcome: Outcome) -> int:
    if outcome.kind in NOT_REACHED:
        return UNREACHABLE
    if outcome.kind != ANSWERED:
        return FAILED
    return {EXIT_IN_SYNC: DONE, EXIT_DRIFT: DIFFERS}.get(outcome.status if outcome.status is not None else -1, FAILED)


def as_json(command: str, outcomes: Sequence[Outcome], code: int, **more: Any) -> dict[str, Any]:
    """Return one object for a run. `nodes` holds for each node its outcome and, as `result`, its agent's answer."""
    return {
        "version": VERSION,
        "command": command,
        "exit": code,
        **more,
        "nodes": [_node_json(outcome) for outcome in outcomes],
    }


def _node_json(outcome: Outcome) -> dict[str, Any]:
    node = outcome.node
    return {
        "name": node.name,
        "address": node.address,
        "group": node.group,
        "instance_id": node.instance_id,
        "outcome": outcome.kind,
        "status": outcome.status,
        "why": outcome.why or None,
        "fix": outcome.fix or None,
        "seconds": round(outcome.seconds, 3),
        **asdict(outcome.traffic),
        "result": outcome.answer and outcome.answer.to_json(),
    }


def tune_lines(outcomes: Sequence[Outcome], *, check: bool) -> list[str]:
    """Return the lines of `node-tune`: a line a node that counts settings, then changes and troubles, node by node.

    What was skipped, by reason, and findings in the environment come once for all nodes that share them.
    """
    changed = Status.CHANGE if check else Status.CHANGED
    heads = (
        "node",
        "profile",
        "settings",
        "ok",
        "to change" if check else "changed",
        "skipped",
        "failed",
        "reboot",
        "",
    )
    lines = table(heads, [_counts(outcome, changed) for outcome in outcomes])
    lines += shared_blocks([(outcome.node.name, _details(outcome)) for outcome in outcomes])
    lines += _grouped("skipped", outcomes, _skipped)
    lines += _grouped("environment", outcomes, _findings)
    waiting = [outcome.node.name for outcome in outcomes if outcome.answer and outcome.answer.reboot]
    more = f"; {name_list(waiting)} need{'s' * (len(waiting) == 1)} a reboot: fab node-reboot" if waiting else ""
    return [*lines, "", summary(outcomes) + more]


def facts_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of `node-facts`: a line a node; all else is in `--json`."""
    heads = ("node", "group", "type", "system", "kernel", "cpus", "GiB", "gpus", "efa", "lustre", "jobs", "")
    lines = table(
        heads, [(outcome.node.name, *_machine(outcome.answer or _NOTHING), _state(outcome)) for outcome in outcomes]
    )
    return [*lines, *_troubles(outcomes), "", summary(outcomes)]


def _machine(answer: Answer) -> list[str]:
    system = " ".join(filter(None, (answer.os.id, answer.os.version))) or None
    release = answer.kernel and answer.kernel.release
    gib = None if answer.memory.gib is None else round(answer.memory.gib)
    lists = (answer.gpu.devices, answer.efa.devices, answer.lustre.mounts, answer.jobs)
    counts = [None if items is None else len(items) for items in lists]
    cells = (answer.group, answer.instance.type, system, release, answer.cpu.count, gib, *counts)
    return ["-" if cell is None else str(cell) for cell in cells]


def reboot_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of `node-reboot`: a line a node."""
    rows = [
        (outcome.node.name, (outcome.answer and outcome.answer.did) or "-", _state(outcome)) for outcome in outcomes
    ]
    return [*table(("node", "did", ""), rows), *_troubles(outcomes), "", summary(outcomes)]


def _troubles(outcomes: Sequence[Outcome]) -> list[str]:
    return shared_blocks([(outcome.node.name, trouble_lines(outcome)) for outcome in outcomes])


def _counts(outcome: Outcome, changed: Status) -> tuple[str, ...]:
    if outcome.answer is None:
        return (outcome.node.name, "-", *["-"] * 6, outcome.kind)
    # A setting has rows for its parts; it is counted once, as its worst.
    worst: dict[str, Status] = {}
    for row in outcome.answer.rows or ():
        worst[row.setting] = max(row.status, worst.get(row.setting, Status.SKIPPED), key=list(Status).index)
    counts = Counter(worst.values())
    failed = counts[Status.FAILED] + counts[Status.CONFLICT] + counts[Status.UNKNOWN]
    figures = (len(worst), counts[Status.OK], counts[changed], counts[Status.SKIPPED], failed, counts[Status.REBOOT])
    return (outcome.node.name, outcome.answer.profile or "-", *map(str, figures), _state(outcome))


def _state(outcome: Outcome) -> str:
    if outcome.status == EXIT_REFUSED:
        return "refused"
    if outcome.kind != ANSWERED:
        return outcome.kind
    return {DONE: "", DIFFERS: "differs"}.get(_code(outcome), "failed")


def _details(outcome: Outcome) -> list[str]:
    """Return the lines that a person has to read about this node, or none."""
    answer = outcome.answer or _NOTHING
    lines = trouble_lines(outcome) + [_row(row) for row in answer.rows or () if row.status in _SHOWN]
    return lines + [f"not as planned: {line}" for line in answer.unplanned]


def shared_blocks(details: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return lines under the names of the nodes that share all of them: a fleet that needs the same is reported like one
    node."""
    sharing: dict[tuple[str, ...], list[str]] = {}
    for name, lines in details:
        if lines:
            sharing.setdefault(tuple(lines), []).append(name)
    return [
        line
        for lines, names in sharing.items()
        for line in ("", f"{name_list(names)}:", *(f"  {plain(line)}" for line in lines))
    ]


def trouble_lines(outcome: Outcome) -> list[str]:
    """Return why a node gave no answer, refused, or failed; one line each."""
    lines = []
    if outcome.why:
        lines.append(f"{outcome.kind}: {outcome.why}" + (f"; fix: {outcome.fix}" if outcome.fix else ""))
    answer = outcome.answer or _NOTHING
    if answer.refused:
        lines.append(f"refused: {answer.refused}")
    return lines + [f"error: {error.where}: {error.why}" for error in answer.errors]


def _row(row: Row) -> str:
    part = f" ({row.part})" if row.part else ""
    target = f" {row.target}" if row.target and row.target != row.setting else ""
    values = f": {_short(row.current)} → {_short(row.wanted)}" if row.wanted is not None else ""
    why = f": {row.why}" if row.why else ""
    return f"{row.status:<8} {row.setting}{part}{target}{values}{why}"


def _short(value: str | None) -> str:
    text = "nothing" if value is None else value
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _skipped(outcome: Outcome) -> list[str]:
    """Return a line for each reason, with the settings that share it."""
    reasons: dict[str, list[str]] = {}
    for row in (outcome.answer or _NOTHING).rows or ():
        if row.status == Status.SKIPPED:
            reasons.setdefault(row.why, []).append(row.setting)
    return [
        f"{_OPT_IN}{name_list(names)}" if why.startswith(_OPT_IN) else f"{why}: {name_list(names)}"
        for why, names in sorted(reasons.items(), key=lambda item: item[0].startswith(_OPT_IN))
    ]


def _findings(outcome: Outcome) -> list[str]:
    return [
        f"{finding.harm}: {finding.name}={finding.value} in {_place(finding)}: {finding.why}; fix: {finding.fix}"
        for finding in (outcome.answer or _NOTHING).lint
    ]


def _place(finding: Finding) -> str:
    return f"{finding.where}:{finding.line}" if finding.line else finding.where


def _grouped(title: str, outcomes: Sequence[Outcome], details_of: Callable[[Outcome], list[str]]) -> list[str]:
    """Return each line once, with the nodes that share it unless all do."""
    sharing: dict[str, list[str]] = {}
    for outcome in outcomes:
        for line in details_of(outcome):
            sharing.setdefault(line, []).append(outcome.node.name)
    answered = sum(outcome.answer is not None for outcome in outcomes)
    lines = [
        f"  {plain(line)}" + ("" if len(names) == answered else f" ({name_list(names)})")
        for line, names in sharing.items()
    ]
    return ["", f"{title}:", *lines] if lines else []


def name_list(names: Sequence[str], most: int = 4) -> str:
    """Write names like `node1, node2 and 6 more`."""
    rest = len(names) - most
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:most])} and {rest} more"


def summary(outcomes: Sequence[Outcome], *, ready: bool = False) -> str:
    """Return the last line: how many nodes ended how."""
    names = {"": "ready", "differs": "not ready"} if ready else {"": "in order"}
    words = Counter(names.get(_state(outcome), _state(outcome)) for outcome in outcomes)
    return f"{len(outcomes)} node{'s' * (len(outcomes) != 1)}: " + ", ".join(
        f"{count} {word}" for word, count in words.most_common()
    )
