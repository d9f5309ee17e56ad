"""What node-verify reports of a fleet: ready nodes, nodes to drain and why, nodes that differ from their group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lustrain.problem import plain
from lustrain.status import Status
from lustrain.tables import table
from node_setup.answers import Check
from node_setup.differences import Difference, find_differences
from node_setup.fleet.pool import Outcome
from node_setup.report import shared_blocks, summary, trouble_lines

_FINE = (Status.OK, Status.SKIPPED)


def differences(outcomes: Sequence[Outcome]) -> list[Difference]:
    """Return the facts in which a node differs from most of its group."""
    answers = {outcome.node.name: outcome.answer for outcome in outcomes if outcome.answer}
    digests = {name: answer.facts_digest for name, answer in answers.items() if answer.facts_digest is not None}
    return find_differences(digests, {outcome.node.name: outcome.node.group or "" for outcome in outcomes})


def as_json(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [asdict(difference) for difference in differences]


def lines(outcomes: Sequence[Outcome], differences: Sequence[Difference]) -> list[str]:
    """Return a line a node, then every check that did not pass, then facts that differ within a group."""
    text = table(("node", "ready", "checks", "not passed", "drain"), [_row(outcome) for outcome in outcomes])
    text += shared_blocks([(outcome.node.name, _details(outcome)) for outcome in outcomes])
    if differences:
        text += [
            "",
            "different from the rest of their group:",
            *(f"  {plain(_group(difference))}{plain(difference.why)}" for difference in differences),
        ]
    return [*text, "", summary(outcomes, ready=True)]


def drain_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return `node reason`, one line for each node with a fault; scontrol takes the rest of the line as a reason."""
    return [
        plain(f"{outcome.node.name} {outcome.answer.drain}")
        for outcome in outcomes
        if outcome.answer and outcome.answer.drain
    ]


def _row(outcome: Outcome) -> tuple[str, ...]:
    answer, checks = outcome.answer, _checks(outcome)
    if answer is None or answer.ready is None:
        return (outcome.node.name, outcome.kind if answer is None else "failed", "-", "-", "")
    bad = sum(check.status not in _FINE for check in checks)
    return (outcome.node.name, "yes" if answer.ready else "no", str(len(checks)), str(bad), answer.drain or "")


def _details(outcome: Outcome) -> list[str]:
    return trouble_lines(outcome) + [_check(check) for check in _checks(outcome) if check.status not in _FINE]


def _checks(outcome: Outcome) -> Sequence[Check]:
    return (outcome.answer and outcome.answer.results) or ()


def _check(check: Check) -> str:
    values = "" if check.expected is None else f" (found {check.actual}, expected {check.expected})"
    return f"{check.status:<8} {check.check}: {check.why}{values}"


def _group(difference: Difference) -> str:
    return f"{difference.group}: " if difference.group else ""
