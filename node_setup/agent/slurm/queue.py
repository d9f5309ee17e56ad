"""States of nodes and jobs, as Slurm's controller tells them on its own machine."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from node_setup.agent.host import TIMED_OUT, Host

FOLDERS = ("/opt/slurm/sbin", "/opt/slurm/bin")
"""ParallelCluster and HyperPod have Slurm here
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
USUAL = ("pending", "running")
"""Of these jobs there are always numbers; of others where there are such jobs."""


@dataclass(frozen=True)
class Queue:
    """Numbers of nodes by state and flag, of jobs by state; `error` is why the controller did not tell them."""

    nodes: dict[tuple[str, str], int] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def collect(host: Host) -> Queue | None:
    """Ask the controller, if it is to run on this machine; None where it is not."""
    if _program(host, "slurmctld") is None:
        return None
    ping = host.run((_program(host, "scontrol") or "scontrol", "ping"))
    if ping.status == TIMED_OUT:
        return Queue(error=ping.complaint)
    # One that is configured elsewhere, or not at all, is not asked: each node with Slurm's packages would ask it.
    states = dict(re.findall(r"^Slurmctld\(\w+\) at ([^\s.]+)\S* is (UP|DOWN)", ping.out, re.M))
    name = (host.read("/proc/sys/kernel/hostname") or "").strip().partition(".")[0]
    if name not in states:
        return None
    if states[name] != "UP":
        return Queue(error="slurmctld does not answer")
    nodes = host.run((_program(host, "sinfo") or "sinfo", "--all", "--noheader", "--Node", "--format=%N %T"))
    jobs = host.run((_program(host, "squeue") or "squeue", "--all", "--noheader", "--format=%T"))
    for done in (nodes, jobs):
        if not done.ok:
            return Queue(error=done.complaint)
    return Queue(parse_nodes(nodes.out), parse_jobs(jobs.out))


def parse_nodes(text: str) -> dict[tuple[str, str], int]:
    """Count the lines `NODE STATE`, of which a node has one for each of its partitions."""
    states = dict(line.split(None, 1) for line in text.splitlines() if " " in line)
    return dict(Counter(_split(state.strip()) for state in states.values()))


def parse_jobs(text: str) -> dict[str, int]:
    """Count jobs by state; an array that waits is one."""
    return {**dict.fromkeys(USUAL, 0), **Counter(line.strip().lower() for line in text.splitlines())}


def _split(state: str) -> tuple[str, str]:
    flags = [FLAGS[sign] for sign in state if sign in FLAGS]
    return state.rstrip("+" + "".join(FLAGS)), flags[0] if flags else ""


def _program(host: Host, name: str) -> str | None:
    paths = (f"{folder}/{name}" for folder in FOLDERS)
    return host.which(name) or next((path for path in paths if host.exists(path)), None)
