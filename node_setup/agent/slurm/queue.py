"""States of nodes and jobs, as Slurm's controller tells them on its own machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from node_setup.agent.host import TIMED_OUT, Host
from node_setup.agent.slurm import watch
from node_setup.agent.slurm.facts import unit_state

PROGRAMS = "/opt/slurm/bin/"
"""ParallelCluster and HyperPod have Slurm here, which nodes may mount from the controller
(https://github.com/aws/aws-parallelcluster-cookbook/blob/develop/cookbooks/aws-parallelcluster-slurm/attributes/slurm_attributes.rb)."""
FLAGS = {
    "*": "not_responding",
    "~": "powered_off",
    "#": "powering_up",
    "!": "power_down_pending",
    "%": "powering_down",
    "$": "maintenance",
    "@": "reboot_pending",
    "^": "reboot_issued",
    "-": "planned",
}
"""Suffixes of a state: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""
ENDING = "ending"
"""The flag of a node that was drained because its machine ends: such a node is out of use on purpose, and soon deleted."""


class Queue(NamedTuple):
    """Numbers of nodes by state and flag, of jobs by state; `error` is why no controller reported them."""

    nodes: Mapping[tuple[str, str], int] = {}
    jobs: Mapping[str, int] = {}
    error: str | None = None


def collect(host: Host) -> Queue | None:
    """Ask the controller, if one is to run on this machine; None where none is."""
    # Not by its program: a folder of a controller that is gone hangs every process that looks into it.
    unit = unit_state(host, "slurmctld.service")
    if unit["load"] != "loaded":
        return None
    folder = "" if host.which("scontrol") else PROGRAMS
    ping = host.run((f"{folder}scontrol", "ping"))
    if ping.status == TIMED_OUT and unit["active"] == "active":
        return Queue(error=ping.complaint)
    # Each node with Slurm's packages has the unit; only controllers ask on.
    states = dict(re.findall(r"^Slurmctld\(\w+\) at ([^\s.]+)\S* is (UP|DOWN)", ping.out, re.M))
    if (host.read("/proc/sys/kernel/hostname") or "").strip().partition(".")[0] not in states:
        return None
    if "UP" not in states.values():
        return Queue(error="slurmctld does not answer")
    nodes = host.run((f"{folder}sinfo", "--all", "--noheader", "--Node", "--format=%N %T %E"))
    jobs = host.run((f"{folder}squeue", "--all", "--noheader", "--format=%T"))
    for done in (nodes, jobs):
        if not done.ok:
            return Queue(error=done.complaint)
    # A node has a line for each of its partitions. Jobs that wait or run always have a number.
    lines = re.findall(r"^(\S+) (\w+)(\S*) ?(.*)$", nodes.out, re.M)
    found = {
        name: (state, ENDING if reason.startswith(watch.ENDING) else FLAGS.get(sign, ""))
        for name, state, sign, reason in lines
    }
    return Queue(Counter(found.values()), {"pending": 0, "running": 0, **Counter(jobs.out.lower().split())})
