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
from node_setup.answers import AgentResponse, Check, Finding, Row
from node_setup.differences import Difference, find_differences
from node_setup.fleet.faults import NOT_REACHED
from node_setup.fleet.pool import ANSWERED, Outcome

VERSION = 1
_SHOWN = (Status.CHANGE, Status.CHANGED, Status.FAILED, Status.CONFLICT, Status.REBOOT, Status.UNKNOWN)
_FINE = (Status.OK, Status.SKIPPED)
_LONGEST = 160
_MOST_NAMES = 4
_OPT_IN = "opt-in: "
_NOTHING = AgentResponse(version=1)


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
        "profile",
        "settings",
        "ok",
        "to change" if check else "changed",
        "skipped",
        "failed",
        "reboot",
        "",
    )
    sections = _grouped("skipped", outcomes, _skipped) + _grouped("environment", outcomes, _findings)
    waiting = [outcome.node.name for outcome in outcomes if outcome.answer and outcome.answer.reboot]
    more = f"; {_name_list(waiting)} need{'s' * (len(waiting) == 1)} a reboot: fab node-reboot" if waiting else ""
    last = _summary(outcomes) + more
    return _report(outcomes, heads, lambda outcome: _counts(outcome, changed), _row_details, sections, last)


def facts_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of `node-facts`: a line a node; all else is in `--json`."""
    heads = ("group", "type", "system", "kernel", "cpus", "GiB", "gpus", "efa", "lustre", "jobs", "")
    return _report(outcomes, heads, _machine, _troubles, (), _summary(outcomes))


def _machine(outcome: Outcome) -> tuple[str, ...]:
    answer = outcome.answer or _NOTHING
    system = " ".join(filter(None, (answer.os.id, answer.os.version))) or None
    release = answer.kernel and answer.kernel.release
    gib = None if answer.memory.gib is None else round(answer.memory.gib)
    lists = (answer.gpu.devices, answer.efa.devices, answer.lustre.mounts, answer.jobs)
    counts = [None if items is None else len(items) for items in lists]
    cells = (answer.group, answer.instance.type, system, release, answer.cpu.count, gib, *counts)
    return (*("-" if cell is None else str(cell) for cell in cells), _state(outcome))


def reboot_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of `node-reboot`: a line a node."""
    return _report(outcomes, ("did", ""), _reboot_cells, _troubles, (), _summary(outcomes))


def _reboot_cells(outcome: Outcome) -> tuple[str, ...]:
    return ((outcome.answer and outcome.answer.did) or "-", _state(outcome))


def verify_lines(outcomes: Sequence[Outcome], differences: Sequence[Difference]) -> list[str]:
    """Return the lines of `node-verify`: a line a node, then every check that did not pass, then facts that differ within a
    group."""
    differing = [f"  {plain(_group(difference))}{plain(difference.why)}" for difference in differences]
    section = ["", "different from the rest of their group:", *differing] if differing else []
    heads = ("ready", "checks", "not passed", "drain")
    return _report(outcomes, heads, _readiness, _check_details, section, _summary(outcomes, ready=True))


def drain_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return `node reason`, one line for each node with a fault; scontrol takes the rest of the line as a reason."""
    return [
        plain(f"{outcome.node.name} {outcome.answer.drain}")
        for outcome in outcomes
        if outcome.answer and outcome.answer.drain
    ]


def differences(outcomes: Sequence[Outcome]) -> list[Difference]:
    """Return the facts in which a node differs from most of its group."""
    answers = {outcome.node.name: outcome.answer for outcome in outcomes if outcome.answer}
    digests = {name: answer.facts_digest for name, answer in answers.items() if answer.facts_digest is not None}
    return find_differences(digests, {outcome.node.name: outcome.node.group or "" for outcome in outcomes})


def _report(
    outcomes: Sequence[Outcome],
    heads: Sequence[str],
    cells: Callable[[Outcome], Sequence[str]],
    details: Callable[[Outcome], list[str]],
    sections: Sequence[str],
    last: str,
) -> list[str]:
    """Return a table with a line for each node, the nodes' details, what concerns several nodes, and the last line."""
    lines = table(("node", *heads), [(outcome.node.name, *cells(outcome)) for outcome in outcomes])
    lines += shared_blocks([(outcome.node.name, details(outcome)) for outcome in outcomes])
    return [*lines, *sections, "", last]


def _readiness(outcome: Outcome) -> tuple[str, ...]:
    answer, checks = outcome.answer, _checks(outcome)
    if answer is None or answer.ready is None:
        return (outcome.kind if answer is None else "failed", "-", "-", "")
    bad = sum(check.status not in _FINE for check in checks)
    return ("yes" if answer.ready else "no", str(len(checks)), str(bad), answer.drain or "")


def _check_details(outcome: Outcome) -> list[str]:
    return _troubles(outcome) + [_check_line(check) for check in _checks(outcome) if check.status not in _FINE]


def _checks(outcome: Outcome) -> Sequence[Check]:
    return (outcome.answer and outcome.answer.results) or ()


def _check_line(check: Check) -> str:
    values = "" if check.expected is None else f" (found {check.actual}, expected {check.expected})"
    return f"{check.status:<8} {check.check}: {check.why}{values}"


def _group(difference: Difference) -> str:
    return f"{difference.group}: " if difference.group else ""


def _counts(outcome: Outcome, changed: Status) -> tuple[str, ...]:
    if outcome.answer is None:
        return ("-", *["-"] * 6, outcome.kind)
    # A setting has rows for its parts; it is counted once, as its worst.
    worst: dict[str, Status] = {}
    for row in outcome.answer.rows or ():
        worst[row.setting] = max(row.status, worst.get(row.setting, Status.SKIPPED), key=list(Status).index)
    counts = Counter(worst.values())
    failed = counts[Status.FAILED] + counts[Status.CONFLICT] + counts[Status.UNKNOWN]
    figures = (len(worst), counts[Status.OK], counts[changed], counts[Status.SKIPPED], failed, counts[Status.REBOOT])
    return (outcome.answer.profile or "-", *map(str, figures), _state(outcome))


def _state(outcome: Outcome) -> str:
    if outcome.status == EXIT_REFUSED:
        return "refused"
    if outcome.kind != ANSWERED:
        return outcome.kind
    return {DONE: "", DIFFERS: "differs"}.get(_code(outcome), "failed")


def _row_details(outcome: Outcome) -> list[str]:
    """Return the lines that a person has to read about this node, or none."""
    answer = outcome.answer or _NOTHING
    lines = _troubles(outcome) + [_row_line(row) for row in answer.rows or () if row.status in _SHOWN]
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
        for line in ("", f"{_name_list(names)}:", *(f"  {plain(line)}" for line in lines))
    ]


def _troubles(outcome: Outcome) -> list[str]:
    """Return why a node gave no answer, refused, or failed; one line each."""
    lines = []
    if outcome.why:
        lines.append(f"{outcome.kind}: {outcome.why}" + (f"; fix: {outcome.fix}" if outcome.fix else ""))
    answer = outcome.answer or _NOTHING
    if answer.refused:
        lines.append(f"refused: {answer.refused}")
    return lines + [f"error: {error.where}: {error.why}" for error in answer.errors]


def _row_line(row: Row) -> str:
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
        f"{_OPT_IN}{_name_list(names)}" if why.startswith(_OPT_IN) else f"{why}: {_name_list(names)}"
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
        f"  {plain(line)}" + ("" if len(names) == answered else f" ({_name_list(names)})")
        for line, names in sharing.items()
    ]
    return ["", f"{title}:", *lines] if lines else []


def _name_list(names: Sequence[str]) -> str:
    """Write names like `node1, node2 and 6 more`."""
    rest = len(names) - _MOST_NAMES
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:_MOST_NAMES])} and {rest} more"


def _summary(outcomes: Sequence[Outcome], *, ready: bool = False) -> str:
    """Return the last line: how many nodes ended how."""
    names = {"": "ready", "differs": "not ready"} if ready else {"": "in order"}
    words = Counter(names.get(_state(outcome), _state(outcome)) for outcome in outcomes)
    return f"{len(outcomes)} node{'s' * (len(outcomes) != 1)}: " + ", ".join(
        f"{count} {word}" for word, count in words.most_common()
    )
