"""Waits for what Slurm's controller says of its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from node_setup.agent.facts.scheduler import is_registered, parse
from node_setup.agent.host import Host
from node_setup.agent.slurm.wanted import Awaited

POLL_S = 1.0


def wait_for_nodes(host: Host, awaited: Awaited, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Return what the controller says of each node, as soon as all awaited ones have registered or their time is over.

    `requeued` are the jobs that wait to start again. `error` is why it says nothing; None where it answers.
    """
    end = time.monotonic() + awaited.wait_s
    while True:
        done = host.run(("scontrol", "show", "node", "--oneliner"), 30)
        nodes = parse(done.out) if done.ok else {}
        if all(is_registered(nodes.get(name, {})) for name in awaited.nodes) or time.monotonic() >= end:
            return {"error": None if done.ok else done.complaint, "nodes": nodes, "requeued": _requeued(host)}
        sleep(POLL_S)


def _requeued(host: Host) -> list[str]:
    # The number last: that of an array which waits may be longer than its column, and touch the next one.
    columns = "--Format=RestartCnt:12,JobArrayID:64"
    done = host.run(("squeue", "--all", "--noheader", "--states=PENDING,REQUEUE_HOLD,SPECIAL_EXIT", columns), 30)
    rows = [line.split(maxsplit=1) for line in done.out.splitlines()] if done.ok else []
    return [number.strip() for restarts, number in rows if restarts != "0"]
