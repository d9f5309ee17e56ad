"""The result of a check, the action it calls for, and the lookup of facts of which any may be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lustrain.status import Status

READY = frozenset({Status.OK, Status.WARNING, Status.SKIPPED})
"""A check whose facts are unknown keeps a node from jobs, as a failed check does, but does not drain it."""

NONE, RESET_GPU, REBOOT, REPLACE = "NONE", "RESET_GPU", "REBOOT", "REPLACE"
ACTIONS = (NONE, RESET_GPU, REBOOT, REPLACE)
"""These actions are in the order of their weight; NONE: a person has to look, or the node needs tuning."""

HYPERPOD = {RESET_GPU: "Action:Reboot", REBOOT: "Action:Reboot", REPLACE: "Action:Replace"}
"""These are the reasons, letter for letter, by which HyperPod repairs a Slurm node that is set to `fail`; anything around it
and it does nothing. A GPU's reset is a reboot there, since processes of others hold the GPU.
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-resiliency-slurm-replace-faulty-instance.html"""


@dataclass(frozen=True)
class Result:
    """This is one check's result: `actual` and `expected` are short texts for a table; `seconds` is what the check took."""

    check: str
    status: Status
    why: str
    action: str = NONE
    actual: str | None = None
    expected: str | None = None
    seconds: float = 0.0


def to_json(result: Result) -> dict[str, Any]:
    """Return the result as JSON data, where `actual` is called `found`."""
    values = asdict(replace(result, seconds=round(result.seconds, 3)))
    return {"found" if name == "actual" else name: value for name, value in values.items()}


def fact_at(facts: Mapping[str, Any], *path: str) -> Any:
    """Return the fact at this path; None where it or anything on the way to it is missing or could not be read."""
    value: Any = facts
    for part in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def reason(facts: Mapping[str, Any], where: str) -> str:
    """Return why facts of this place are missing, from their collector; empty where it named no reason."""
    why = [
        str(error.get("why")) for error in facts.get("errors") or () if str(error.get("where", "")).startswith(where)
    ]
    return why[0] if why else ""


def unread_result(check: str, facts: Mapping[str, Any], where: str, what: str) -> Result:
    """Return the result of a check whose facts could not be read."""
    why = reason(facts, where)
    return Result(check, Status.UNKNOWN, f"{what} could not be read" + (f": {why}" if why else ""))


def judge_count(check: str, count: int, expected: int, what: str, action: str) -> Result:
    """Judge devices by their number: too few fail, more than expected warn."""
    if expected == 0 and count == 0:
        return Result(check, Status.SKIPPED, f"the type has no {what}")
    if count < expected:
        status, why = Status.FAILED, f"{expected - count} of {expected} {what} are missing"
    elif count > expected:
        status, why = Status.WARNING, f"more {what} than the type has, or than the cluster attaches"
    else:
        status, why = Status.OK, "all there"
    return Result(check, status, why, action if status == Status.FAILED else NONE, str(count), str(expected))


def worst(results: Iterable[Result]) -> Result | None:
    """Return the failed result that calls for most; None where none failed."""
    failed = [result for result in results if result.status == Status.FAILED]
    return max(failed, key=lambda result: ACTIONS.index(result.action), default=None)


def drain(results: Iterable[Result]) -> str | None:
    """Return one line for `scontrol update … state=drain reason=`; None where nothing failed.

    The unknown does not drain a node: suites that took a tool that does not answer for broken hardware emptied healthy nodes
    (NVIDIA/DCGM issue 308), and ones that took it for health kept broken ones (IBM/autopilot issue 68). So a node of which
    something is unknown is neither ready nor drained. The action is named, NONE too, since a drained node without a known
    action waits forever (NVIDIA/NVSentinel issue 911).
    """
    results = list(results)
    first = worst(results)
    if first is None:
        return None
    others = sum(result.status == Status.FAILED for result in results) - 1
    more = f" (and {others} more)" if others else ""
    line = f"lustrain: {first.check}: {first.why}{more}; action={first.action}"
    return " ".join(line.replace('"', "'").split())
