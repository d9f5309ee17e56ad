"""Checks of the limits that jobs inherit from slurmd, and of the node's part in a stack's Slurm."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.facts.scheduler import UNUSABLE, is_registered
from node_setup.agent.model import Facts, Request
from node_setup.agent.verify.expected import ExpectedHardware
from node_setup.agent.verify.result import Result, fact_at

NODE_CHECK, ACCOUNTING_CHECK = "slurm-node", "slurm-accounting"
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


def node(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check what the controller says of this node, and on the controller and on logins, that it answers."""
    mine = facts.get("slurm")
    if not mine:
        return Result(NODE_CHECK, Status.SKIPPED, "the stack has no Slurm here")
    if mine["error"]:
        # A controller that does not answer is no fault of its nodes.
        status = Status.FAILED if mine["duty"] == "controller" else Status.UNKNOWN
        return Result(NODE_CHECK, status, f"slurmctld does not answer: {mine['error']}")
    if mine["duty"] != "compute":
        return Result(NODE_CHECK, Status.OK, "slurmctld answers")
    return _judge_node(mine["node"], mine["gres"])


def _judge_node(node: dict[str, str] | None, wanted: str | None) -> Result:
    if node is None or None in (node["state"], node["gres"], wanted):
        return Result(NODE_CHECK, Status.UNKNOWN, "what the controller says of this node could not be read")
    if not is_registered(node):
        why = "the node has not registered; fix: journalctl -u slurmd; systemctl restart lustrain-boot"
        return Result(NODE_CHECK, Status.FAILED, why, actual=node["state"])
    if any(word in node["state"] for word in UNUSABLE):
        return Result(NODE_CHECK, Status.FAILED, f"it takes no jobs: {node['reason']}", actual=node["state"])
    if node["gres"] != wanted:
        why = "Slurm's devices of this node are not those that it has; fix: systemctl restart lustrain-boot"
        return Result(NODE_CHECK, Status.FAILED, why, actual=node["gres"], expected=wanted)
    return Result(NODE_CHECK, Status.OK, "registered", actual=node["state"])


def state_volume(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that the controller keeps its queue on its own volume, which outlives the instance."""
    mine = facts.get("slurm") or {}
    if not mine.get("volume"):
        return Result("slurm-state", Status.SKIPPED, "no state of a controller here")
    if mine["mounted"]:
        return Result("slurm-state", Status.OK, f"on {mine['volume']}")
    if mine["mounted"] is None:
        return Result("slurm-state", Status.UNKNOWN, "mounts could not be read")
    why = f"{mine['volume']} is not mounted; fix: systemctl restart lustrain-boot"
    return Result("slurm-state", Status.FAILED, why)


def accounting(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check that slurmdbd answers on the controller, and that the cluster is registered there."""
    records = (facts.get("slurm") or {}).get("accounting")
    if records is None:
        return Result(ACCOUNTING_CHECK, Status.SKIPPED, "no accounting here")
    if records["error"]:
        why = f"slurmdbd does not answer: {records['error']}; fix: journalctl -u slurmdbd -u mariadb"
        return Result(ACCOUNTING_CHECK, Status.FAILED, why)
    if records["registered"] is None:
        return Result(ACCOUNTING_CHECK, Status.UNKNOWN, "whether the cluster is registered could not be read")
    if not records["registered"]:
        why = "slurmctld is not registered with slurmdbd; fix: journalctl -u slurmctld; systemctl restart slurmctld"
        return Result(ACCOUNTING_CHECK, Status.FAILED, why)
    return Result(ACCOUNTING_CHECK, Status.OK, "slurmdbd answers, and the cluster is registered")


CHECKS = (memlock, node, state_volume, accounting)
