"""Checks of the machine: whether it is the type that the cluster describes, and whether it is about to end."""

from __future__ import annotations

from lustrain.status import Status
from node_setup.agent.model import Facts, Request
from node_setup.agent.run.refusal import REBOOTS, is_near, notice_text
from node_setup.agent.verify.expected import BY_HAND, ExpectedHardware
from node_setup.agent.verify.result import REPLACE, Result, fact_at, judge_count, unread_result


def instance_type(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check the type. An unknown type is not ready: checks that compare with nothing pass everything
    (https://github.com/awslabs/awsome-distributed-ai/pull/1201)."""
    node_type = fact_at(facts, "instance", "type")
    groups = request.document.get("groups") or {}
    if want.group and groups and want.group not in groups:
        return Result(
            "instance-type", Status.UNKNOWN, f"the cluster has no group {want.group}; it has {', '.join(groups)}"
        )
    if want.problem:
        return Result("instance-type", Status.FAILED if want.other else Status.UNKNOWN, want.problem, actual=node_type)
    by = "counts by hand" if want.gpu == "" and want.type is None else str(want.type)
    return Result(
        "instance-type", Status.OK, "as the cluster describes it" if groups else "known", actual=node_type or by
    )


def notice(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Refuse a node that is about to go: spot interruption, an ending life cycle, maintenance within hours. What is
    far off, or only recommended, is a warning (`node_setup.agent.run.refusal.is_near`)."""
    pending = fact_at(facts, "metadata", "notice")
    if pending:
        more = "; a reboot may settle it: fab node-reboot" if pending.get("action") in REBOOTS else ""
        return Result("notice", Status.FAILED if is_near(pending) else Status.WARNING, f"{notice_text(pending)}{more}")
    if fact_at(facts, "metadata", "error"):
        return Result("notice", Status.UNKNOWN, f"instance metadata does not answer: {facts['metadata']['error']}")
    if fact_at(facts, "metadata", "reachable"):
        return Result("notice", Status.OK, "none pending")
    if request.document.get("backend") == BY_HAND or not request.document:
        return Result("notice", Status.SKIPPED, "not an EC2 instance")
    return Result("notice", Status.UNKNOWN, "instance metadata was not reached")


def nvme(facts: Facts, want: ExpectedHardware, request: Request) -> Result:
    """Check local drives by the type's count; a missing drive is the machine's fault."""
    blocks = fact_at(facts, "blocks")
    if blocks is None:
        return unread_result("nvme", facts, "blocks", "block devices")
    if want.nvme is None:
        return Result("nvme", Status.UNKNOWN, "the number of local drives of this type is not known")
    stores = [block.get("instance_store") for block in blocks]
    count = sum(map(bool, stores))
    if count < want.nvme and None in stores:
        return Result("nvme", Status.UNKNOWN, "whether some drive is local could not be read", actual=str(count))
    return judge_count("nvme", count, want.nvme, "local drives", REPLACE)


CHECKS = (instance_type, notice, nvme)
