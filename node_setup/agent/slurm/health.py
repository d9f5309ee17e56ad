"""What slurmd's HealthCheckProgram does: a node that `verify` finds a fault of its own in is drained with the reason."""

from __future__ import annotations

import os
from typing import Any

from lustrain.status import Status
from node_setup.agent import verify
from node_setup.agent.facts import scheduler
from node_setup.agent.host import Host
from node_setup.agent.model import EXIT_FAILED, EXIT_IN_SYNC, Facts, Request
from node_setup.agent.verify.result import Result, drain
from node_setup.agent.verify.slurm import NODE_CHECK

SHARED = frozenset({"clock", "home-mount", "lustre-stripes", "lustre-targets", "s3-mounts", NODE_CHECK})
"""Checks that fail on all nodes at once, where the file system, a bucket or the source of time is at fault, or where a mount
was added that running nodes do not have: every node would be drained, and stay so until a person resumes each. munge and
Slurm bear clocks that are far more off than the check allows."""


def check(host: Host, facts: Facts, request: Request) -> tuple[dict[str, Any], int]:
    """Verify the node by its facts, and drain it for a fault of its own; a node that was never tuned is left alone.

    It is never resumed here: the person who mended the node does that, or a fault that comes and goes would take job after job.
    """
    if not request.document:
        return {
            "drained": None,
            "why": "this node was never tuned, so that what it should be is not known",
        }, EXIT_IN_SYNC
    result, _ = verify.verify(host, facts, request, "facts")
    reason = drain(
        Result(row["check"], Status(row["status"]), row["why"], row["action"])
        for row in result["results"]
        if row["check"] not in SHARED
    )
    if reason is None:
        return {"drained": None, "why": ""}, EXIT_IN_SYNC
    node = os.uname().nodename.partition(".")[0]
    shown = host.run(("scontrol", "show", "node", "--oneliner", node), 30)
    if not shown.ok:
        # It may be drained by a person, whose reason would be lost.
        return {"drained": None, "why": shown.complaint}, EXIT_FAILED
    if "DRAIN" in str(scheduler.parse(shown.out).get(node, {}).get("state")):
        return {"drained": None, "why": "it is drained already, and keeps that reason"}, EXIT_IN_SYNC
    done = host.run(("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"), 30)
    return {"drained": reason, "why": "" if done.ok else done.complaint}, EXIT_IN_SYNC if done.ok else EXIT_FAILED
