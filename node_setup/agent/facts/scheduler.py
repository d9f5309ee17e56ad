"""What Slurm's controller says of its nodes, and of this one, where the stack has a Slurm."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from node_setup.agent.facts.instance import NODE
from node_setup.agent.facts.reading import MachineReading
from node_setup.agent.host import Host

EMPTY: dict[str, Any] = {"slurm": None}
NOT_KNOWN = "UNKNOWN to the controller"
CONF = "/etc/slurm/slurm.conf"
STATE = "/var/spool/slurmctld"
OPTIONS = "/etc/default/slurmd"
NOT_REGISTERED = ("UNKNOWN", "FUTURE", "*", "NOT_RESPONDING")
UNUSABLE = ("DOWN", "DRAIN", "FAIL", "INVAL", "NO_RESPOND", "MAINT")
"""In a state: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""
FIELDS = {"state": "State", "gres": "Gres", "version": "Version"}


def collect(reading: MachineReading) -> dict[str, Any]:
    role = json.loads(reading.host.read(NODE) or "{}").get("slurm")
    if not role:
        return EMPTY
    host, node = reading.host, None
    if role["duty"] == "compute":
        node, error = show_node(host, own_name(host))
        if error is None:
            node = node or {"state": NOT_KNOWN, "gres": None, "version": None, "reason": None}
            node["gres"] = without_sockets(node["gres"]) or ""
    else:
        done = host.run(("scontrol", "ping"), 30)
        error = None if done.ok else done.complaint
    wanted = re.search(r"\bGres=([^\s']+)", host.read(OPTIONS) or "")
    return {
        "slurm": {
            "duty": role["duty"],
            "error": error,
            "node": node,
            "gres": wanted[1] if wanted else "",
            "volume": role.get("state_volume"),
            "mounted": any(mount.target == STATE for mount in reading.mounts),
            "accounting": _accounting(host) if role["duty"] == "controller" else None,
        }
    }


def _accounting(host: Host) -> dict[str, Any] | None:
    """Return whether slurmdbd answers and knows the cluster by its controller; None where slurm.conf names no slurmdbd."""
    conf = dict(re.findall(r"^(ClusterName|AccountingStorageType)=(\S+)", host.read(CONF) or "", re.M))
    if conf.get("AccountingStorageType") != "accounting_storage/slurmdbd":
        return None
    words = (
        "sacctmgr",
        "--noheader",
        "--parsable2",
        "show",
        "cluster",
        conf.get("ClusterName", ""),
        "format=controlhost",
    )
    done = host.run(words, 30)
    return {"error": None if done.ok else done.complaint, "registered": bool(done.out.strip()) if done.ok else None}


def without_sockets(shown: str | None) -> str | None:
    """Return what `scontrol` shows without the sockets that devices are local to: `gpu:h100:8` of `gpu:h100:8(S:0-1)`."""
    return re.sub(r"\([^)]*\)", "", shown or "") or None


def own_name(host: Host) -> str:
    """Return the name by which Slurm knows this machine."""
    return (host.read("/proc/sys/kernel/hostname") or "").strip().partition(".")[0]


def show_node(host: Host, name: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return what the controller says of a node, None where it knows none; and why it says nothing, None where it answers."""
    done = host.run(("scontrol", "show", "node", "--oneliner", name), 30)
    if done.ok:
        return parse(done.out).get(name), None
    return None, None if f"Node {name} not found" in done.out + done.err else done.complaint


def is_registered(node: dict[str, Any]) -> bool:
    state = str(node.get("state") or "UNKNOWN")
    return not any(word in state for word in NOT_REGISTERED)


def parse(text: str, fields: Mapping[str, str] = FIELDS) -> dict[str, dict[str, Any]]:
    """Read `scontrol show node --oneliner`: state, gres, version and reason of each node by name, or other `fields`."""
    nodes = {}
    for line in text.splitlines():
        words = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        reason = re.search(r"\sReason=(.*?)(?:\s+\[[^\]]*\])?(?:\s+Comment=.*)?$", line)
        if "NodeName" in words:
            read: dict[str, Any] = {key: words.get(name) for key, name in fields.items()}
            read["gres"] = None if read["gres"] == "(null)" else read["gres"]
            nodes[words["NodeName"]] = {**read, "reason": reason[1].strip() if reason else None}
    return nodes
