"""What node-verify says of the fleet: who is ready, who is to be drained and why, and who is unlike the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lustrain.problem import plain
from lustrain.tables import table
from node_setup.differences import Odd, odd_ones
from node_setup.fleet.pool import Outcome
from node_setup.report import blocks, summary, trouble

_FINE = ("OK", "SKIP")


def odd(outcomes: Sequence[Outcome]) -> list[Odd]:
    """Facts in which a node differs from most of its group's."""
    results = {one.node.name: one.result for one in outcomes if one.result and "facts_digest" in one.result}
    groups = {one.node.name: one.node.group or "" for one in outcomes}
    return odd_ones({name: dict(result["facts_digest"]) for name, result in results.items()}, groups)


def as_json(found: Sequence[Odd]) -> list[dict[str, Any]]:
    return [asdict(one) for one in found]


def lines(outcomes: Sequence[Outcome], found: Sequence[Odd]) -> list[str]:
    """A line a node, then every check that did not pass, then the odd ones out."""
    said = table(("node", "ready", "checks", "not passed", "drain"), [_row(one) for one in outcomes])
    said += blocks([(one.node.name, _details(one)) for one in outcomes])
    if found:
        said += ["", "unlike the others:", *(f"  {plain(_group(one))}{plain(one.why)}" for one in found)]
    return [*said, "", summary(outcomes, ready=True)]


def drain_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """`node reason`, for nodes whose agent found a fault: what scontrol takes as a reason."""
    found = [(one.node.name, (one.result or {}).get("drain")) for one in outcomes]
    return [plain(f"{name} {reason}") for name, reason in found if reason]


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.result is None or "ready" not in outcome.result:
        return (outcome.node.name, outcome.kind if outcome.result is None else "failed", "-", "-", "")
    checks = _checks(outcome)
    bad = sum(check["status"] not in _FINE for check in checks)
    ready = "yes" if outcome.result["ready"] else "no"
    return (outcome.node.name, ready, str(len(checks)), str(bad), str(outcome.result.get("drain") or ""))


def _details(outcome: Outcome) -> list[str]:
    return trouble(outcome) + [_check(check) for check in _checks(outcome) if check["status"] not in _FINE]


def _checks(outcome: Outcome) -> Sequence[Mapping[str, Any]]:
    return (outcome.result or {}).get("results") or []


def _check(check: Mapping[str, Any]) -> str:
    values = ""
    if check.get("expected") is not None:
        values = f" (found {check.get('found')}, expected {check['expected']})"
    return f"{check['status']:<8} {check['check']}: {check['why']}{values}"


def _group(found: Odd) -> str:
    return f"{found.group}: " if found.group else ""
