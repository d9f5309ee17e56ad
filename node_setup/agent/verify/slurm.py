"""Checks of the limits that jobs inherit from slurmd."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import Result, fact_at

ENOUGH_BYTES = 16 * 2**30
"""Below it registering buffers with EFA fails. awslabs/awsome-distributed-ai, GPU health check 2."""


def memlock(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check the locked memory of the running slurmd, which jobs inherit; a login's `ulimit -l` says nothing of them."""
    limits = fact_at(facts, "limits", "slurmd")
    if limits is None:
        return _without_slurmd(facts, want, request)
    values = limits.get("memlock")
    if not values:
        return Result("slurmd-memlock", Status.UNKNOWN, "slurmd's limits could not be read")
    small = [value for value in map(str, values) if value != "unlimited"]
    if not small:
        return Result("slurmd-memlock", Status.OK, "unlimited")
    enough = all(value.isdigit() and int(value) >= ENOUGH_BYTES for value in small)
    status = Status.WARNING if enough else Status.FAILED
    return Result(
        "slurmd-memlock",
        status,
        "limited; fix: fab node-tune, then restart slurmd",
        actual=small[0],
        expected="unlimited",
    )


def _without_slurmd(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    unit = fact_at(facts, "services", "slurmd.service") or {}
    if unit.get("load") == "loaded" and unit.get("active") == "active":
        return Result("slurmd-memlock", Status.UNKNOWN, "slurmd runs, but its limits could not be read")
    if request.document.get("backend") == "hyperpod-slurm" and want.role == "worker":
        return Result("slurmd-memlock", Status.UNKNOWN, "slurmd does not run on this Slurm worker")
    return Result("slurmd-memlock", Status.SKIPPED, "no slurmd here")


CHECKS = (memlock,)
