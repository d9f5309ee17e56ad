"""What Slurm's controller says of its nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from node_setup.agent.host import Host
from node_setup.agent.slurm.wanted import Awaited

POLL_S = 1.0
NOT_REGISTERED = ("UNKNOWN", "FUTURE", "*", "NOT_RESPONDING")
"""In a state: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""
_FIELDS = {"state": "State", "gres": "Gres", "version": "Version"}


def wait_for_nodes(host: Host, awaited: Awaited, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Return what the controller says of each node, as soon as all awaited ones have registered or their time is over.

    `error` is why it says nothing; None where it answers.
    """
    end = time.monotonic() + awaited.wait_s
    while True:
        done = host.run(("scontrol", "show", "node", "--oneliner"), 30)
        nodes = parse(done.out) if done.ok else {}
        if all(is_registered(nodes.get(name, {})) for name in awaited.nodes) or time.monotonic() >= end:
            return {"error": None if done.ok else done.complaint, "nodes": nodes}
        sleep(POLL_S)


def is_registered(node: dict[str, Any]) -> bool:
    state = str(node.get("state") or "UNKNOWN")
    return not any(word in state for word in NOT_REGISTERED)


def parse(text: str) -> dict[str, dict[str, Any]]:
    """Read `scontrol show node --oneliner`: state, gres, version and reason of each node by name."""
    nodes = {}
    for line in text.splitlines():
        words = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        reason = re.search(r"\sReason=(.*?)(?:\s+\[[^\]]*\])?(?:\s+Comment=.*)?$", line)
        if "NodeName" in words:
            read: dict[str, Any] = {key: words.get(name) for key, name in _FIELDS.items()}
            read["gres"] = None if read["gres"] == "(null)" else read["gres"]
            nodes[words["NodeName"]] = {**read, "reason": reason[1].strip() if reason else None}
    return nodes
