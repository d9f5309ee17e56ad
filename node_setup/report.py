"""What a run came to, for people as a table and what needs their eyes, for programs as one JSON object. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lustrain.problem import plain
from lustrain.tables import table
from node_setup.agent.model import (
    CHANGE,
    CHANGED,
    CONFLICT,
    EXIT_DRIFT,
    EXIT_IN_SYNC,
    EXIT_REFUSED,
    FAILED,
    OK,
    REBOOT,
    SKIPPED,
    UNKNOWN,
)
from node_setup.fleet.faults import NOT_REACHED
from node_setup.fleet.pool import ANSWERED, Outcome

SYNC, FAILURE, DRIFT, UNREACHED = 0, 1, 2, 3
VERSION = 1
_SHOWN = (CHANGE, CHANGED, FAILED, CONFLICT, REBOOT, UNKNOWN)
_WORST_FIRST = (FAILED, CONFLICT, UNKNOWN, REBOOT, CHANGE, CHANGED, OK, SKIPPED)
"""A setting has rows for its parts; it is counted once, as its worst, and one that is in place in part is in place."""
_LONGEST = 160
_OPT_IN = "opt-in: "


def exit_code(outcomes: Iterable[Outcome], least: int = SYNC) -> int:
    """0 all well, 1 a node failed, refused or was not begun, 3 one was not reached, 2 one differs or is not ready;
    1 goes before 3, 3 before 2. `least` is what else the run came to."""
    codes = {least, *(_code(one) for one in outcomes)}
    return next((code for code in (FAILURE, UNREACHED, DRIFT) if code in codes), SYNC)


def _code(outcome: Outcome) -> int:
    if outcome.kind in NOT_REACHED:
        return UNREACHED
    if outcome.kind != ANSWERED:
        return FAILURE
    return {EXIT_IN_SYNC: SYNC, EXIT_DRIFT: DRIFT}.get(outcome.status if outcome.status is not None else -1, FAILURE)


def as_json(command: str, outcomes: Sequence[Outcome], code: int, **more: Any) -> dict[str, Any]:
    """One object for a run. `nodes` holds for each node what came of it and, as `result`, what its agent said."""
    return {
        "version": VERSION,
        "command": command,
        "exit": code,
        **more,
        "nodes": [_node_json(one) for one in outcomes],
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
        "result": outcome.result,
    }


def tuned(outcomes: Sequence[Outcome], *, check: bool) -> list[str]:
    """Of `node-tune`: a line a node that counts settings, then what changed or needs eyes, node by node; what was left out,
    by why, and findings in the environment, once for all nodes that share them."""
    changed = CHANGE if check else CHANGED
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
    lines = table(heads, [_counts(one, changed) for one in outcomes])
    lines += blocks([(one.node.name, _details(one)) for one in outcomes])
    lines += _grouped("skipped", outcomes, _skipped)
    lines += _grouped("environment", outcomes, _findings)
    waiting = [one.node.name for one in outcomes if (one.result or {}).get("reboot")]
    more = f"; {named(waiting)} need{'s' * (len(waiting) == 1)} a reboot: fab node-reboot" if waiting else ""
    return [*lines, "", summary(outcomes) + more]


def facts(outcomes: Sequence[Outcome]) -> list[str]:
    """Of `node-facts`: a line a node; all else is in `--json`."""
    heads = ("node", "group", "type", "system", "kernel", "cpus", "GiB", "gpus", "efa", "lustre", "jobs", "")
    lines = table(heads, [(one.node.name, *_machine(one.result or {}), _word(one)) for one in outcomes])
    return [*lines, *_troubles(outcomes), "", summary(outcomes)]


def _machine(found: Mapping[str, Any]) -> list[str]:
    def of(*path: str) -> Any:
        value: Any = found
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def count(*path: str) -> str:
        value = of(*path)
        return "-" if value is None else str(len(value))

    texts = [of("group"), of("instance", "type"), _joined(of("os", "id"), of("os", "version")), of("kernel", "release")]
    memory = of("memory", "gib")
    figures = [of("cpu", "count"), None if memory is None else round(memory)]
    counts = [count("gpu", "devices"), count("efa", "devices"), count("lustre", "mounts"), count("jobs")]
    return ["-" if value is None else str(value) for value in (*texts, *figures)] + counts


def _joined(*words: Any) -> str | None:
    return " ".join(str(word) for word in words if word) or None


def rebooted(outcomes: Sequence[Outcome]) -> list[str]:
    """Of `node-reboot`: a line a node."""
    rows = [(one.node.name, str((one.result or {}).get("did") or "-"), _word(one)) for one in outcomes]
    return [*table(("node", "did", ""), rows), *_troubles(outcomes), "", summary(outcomes)]


def _troubles(outcomes: Sequence[Outcome]) -> list[str]:
    return blocks([(one.node.name, trouble(one)) for one in outcomes])


def _counts(outcome: Outcome, changed: str) -> tuple[str, ...]:
    if outcome.result is None:
        return (outcome.node.name, "-", *["-"] * 6, outcome.kind)
    rows = outcome.result.get("rows") or []
    worst: dict[str, str] = {}
    for row in rows:
        worst[row["setting"]] = min(row["status"], worst.get(row["setting"], SKIPPED), key=_WORST_FIRST.index)
    counts = Counter(worst.values())
    failed = counts[FAILED] + counts[CONFLICT] + counts[UNKNOWN]
    figures = (len(worst), counts[OK], counts[changed], counts[SKIPPED], failed, counts[REBOOT])
    profile = str(outcome.result.get("profile") or "-")
    return (outcome.node.name, profile, *map(str, figures), _word(outcome))


def _word(outcome: Outcome) -> str:
    if outcome.status == EXIT_REFUSED:
        return "refused"
    if outcome.kind != ANSWERED:
        return outcome.kind
    return {SYNC: "", DRIFT: "differs"}.get(_code(outcome), "failed")


def _details(outcome: Outcome) -> list[str]:
    """What a person has to know of this node, or nothing."""
    lines = trouble(outcome)
    result = outcome.result or {}
    lines += [_row(row) for row in result.get("rows") or [] if row["status"] in _SHOWN]
    lines += [f"not as planned: {one}" for one in result.get("unplanned") or []]
    return lines


def blocks(details: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines under the names of the nodes that share all of them: a fleet that needs the same reads like one node."""
    sharing: dict[tuple[str, ...], list[str]] = {}
    for name, said in details:
        if said:
            sharing.setdefault(tuple(said), []).append(name)
    return [
        line
        for said, names in sharing.items()
        for line in ("", f"{named(names)}:", *(f"  {plain(one)}" for one in said))
    ]


def trouble(outcome: Outcome) -> list[str]:
    """Why a node gave no answer, refused, or failed; one line each."""
    lines = []
    if outcome.why:
        lines.append(f"{outcome.kind}: {outcome.why}" + (f"; fix: {outcome.fix}" if outcome.fix else ""))
    result = outcome.result or {}
    if result.get("refused"):
        lines.append(f"refused: {result['refused']}")
    lines += [f"error: {one['where']}: {one['why']}" for one in result.get("errors") or []]
    return lines


def _row(row: Mapping[str, Any]) -> str:
    part = f" ({row['part']})" if row.get("part") else ""
    target = f" {row['target']}" if row.get("target") and row["target"] != row["setting"] else ""
    values = f": {_short(row.get('found'))} → {_short(row.get('wanted'))}" if row.get("wanted") is not None else ""
    why = f": {row['why']}" if row.get("why") else ""
    return f"{row['status']:<8} {row['setting']}{part}{target}{values}{why}"


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _skipped(outcome: Outcome) -> list[str]:
    """A line for each reason, with the settings that share it."""
    reasons: dict[str, list[str]] = {}
    for row in (outcome.result or {}).get("rows") or []:
        if row["status"] == SKIPPED:
            reasons.setdefault(row["why"], []).append(row["setting"])
    return [
        f"{_OPT_IN}{named(names)}" if why.startswith(_OPT_IN) else f"{why}: {named(names)}"
        for why, names in sorted(reasons.items(), key=lambda one: one[0].startswith(_OPT_IN))
    ]


def _findings(outcome: Outcome) -> list[str]:
    found = (outcome.result or {}).get("lint") or []
    return [
        f"{one['harm']}: {one['name']}={one['value']} in {_place(one)}: {one['why']}; fix: {one['fix']}"
        for one in found
    ]


def _place(finding: Mapping[str, Any]) -> str:
    return f"{finding['where']}:{finding['line']}" if finding.get("line") else str(finding["where"])


def _grouped(title: str, outcomes: Sequence[Outcome], said: Any) -> list[str]:
    """Each line once, with the nodes that share it unless all do."""
    sharing: dict[str, list[str]] = {}
    for one in outcomes:
        for line in said(one):
            sharing.setdefault(line, []).append(one.node.name)
    answered = sum(one.result is not None for one in outcomes)
    lines = [
        f"  {plain(line)}" + ("" if len(names) == answered else f" ({named(names)})") for line, names in sharing.items()
    ]
    return ["", f"{title}:", *lines] if lines else []


def named(names: Sequence[str], most: int = 4) -> str:
    """`node1, node2 and 6 more`."""
    rest = len(names) - most
    return ", ".join(names) if rest <= 0 else f"{', '.join(names[:most])} and {rest} more"


def summary(outcomes: Sequence[Outcome], *, ready: bool = False) -> str:
    """The last line: how many nodes ended how."""
    names = {"": "ready", "differs": "not ready"} if ready else {"": "in order"}
    words = Counter(names.get(_word(one), _word(one)) for one in outcomes)
    return f"{len(outcomes)} node{'s' * (len(outcomes) != 1)}: " + ", ".join(
        f"{count} {word}" for word, count in words.most_common()
    )
