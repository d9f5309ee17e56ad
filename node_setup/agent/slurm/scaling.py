"""How many machines a group shall have that goes to zero, from Slurm's queue and the group's state. Pure.

Machines are ended one by one and by name, each after Slurm has drained it without a job: a lower desired capacity would let
Auto Scaling choose, and it knows of no jobs (https://github.com/aws/aws-parallelcluster/issues/1401).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BOOTED_WITHIN_S = 3600.0
"""Several times what a boot takes. A machine that is no node by then is ended: it would be billed and never work."""
HOLDS_S = (300.0, 600.0, 1200.0, 2400.0, 3600.0)
"""Pauses after launches that failed, one after the other: capacity that is not there now seldom is a minute later."""
HELPED = (
    "None",
    "Resources",
    "Priority",
    "PartitionConfig",
    "PartitionNodeLimit",
    "ReqNodeNotAvail",
    "NodeDown",
    "Nodes_required_for_job_are_DOWN",
)
"""What reasons of waiting jobs begin with that more nodes may end (https://slurm.schedmd.com/job_reason_codes.html); without a
node in the partition it is PartitionConfig (seen with 22.05)."""
ANY_NODES = "nodes="
QUEUE = f"%i %t %D %C %P {ANY_NODES}%n %r"
"""Number, state, nodes, processors, partitions, nodes that are asked for by name, reason
(https://slurm.schedmd.com/squeue.html#OPT_format)."""
RESERVED = "ReqNodeNotAvail,_Reserved"
"""Begins the reason of a job that waits for the end of a reservation, as for maintenance: more nodes do not help it."""
BOOTING, IDLE, KEPT, ENDING = "booting", "idle", "kept", "ending"
"""States of a machine: no node of Slurm yet, a node without a job, one with a job or out of service, drained to be ended."""


@dataclass(frozen=True)
class Waiting:
    """A job that waits for nodes, or the tasks of an array that may start: `tasks` times `nodes`, each with `cpus` in all."""

    job: str
    partitions: tuple[str, ...]
    nodes: int
    tasks: int = 1
    cpus: int = 1


@dataclass(frozen=True)
class Machine:
    """An instance that counts in its group; it has been in this state for `for_s` seconds."""

    instance: str
    node: str | None
    state: str
    for_s: float


@dataclass(frozen=True)
class Group:
    """An Auto Scaling group as it is. It has wanted more machines than it has for `unfilled_s` seconds; `held`: a launch failed
    a short while ago; `cpus`: processors of its smallest machine, None where they are not known; `unproven`: its last machines
    became no nodes."""

    name: str
    partition: str
    desired: int
    most: int
    machines: tuple[Machine, ...]
    unfilled_s: float = 0.0
    held: bool = False
    cpus: int | None = None
    unproven: bool = False


@dataclass(frozen=True)
class Change:
    """The desired capacity to set first, None where it is right; then the machines to end, each of which lowers it by one.
    Nodes of the `freed` take jobs again: their machines were to end, and are still there."""

    desired: int | None = None
    ended: tuple[Machine, ...] = ()
    freed: tuple[Machine, ...] = ()
    lost: tuple[Machine, ...] = ()


def waiting_jobs(listed: str) -> list[Waiting]:
    """Read `squeue --format=QUEUE` of pending and running jobs. A job that names its nodes needs those, and no other ones."""
    jobs, running = [], dict[str, int]()
    rows = [line.split(None, 6) for line in listed.splitlines()]
    for job, state, *_ in rows:
        if state != "PD":
            running[job.partition("_")[0]] = running.get(job.partition("_")[0], 0) + 1
    for job, state, nodes, cpus, partitions, named, *reason in rows:
        why = (reason or ["None"])[0].replace(" ", "_")
        if state == "PD" and named == ANY_NODES and why.startswith(HELPED) and not why.startswith(RESERVED):
            tasks = array_tasks(job, running.get(job.partition("_")[0], 0))
            jobs.append(Waiting(job.partition("_")[0], tuple(partitions.split(",")), int(nodes), tasks, int(cpus)))
    return jobs


def array_tasks(job: str, running: int) -> int:
    """Return how many tasks of `7_[0-9:2,12%3]` may start beside those that run: its list, and its throttle after the `%`."""
    _, of_array, listed = job.partition("_[")
    if not of_array:
        return 1
    listed, _, throttle = listed.rstrip("]").partition("%")
    tasks = 0
    for span in listed.split(","):
        # squeue ends a long list with `...`, in the middle of a number.
        if found := re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", span):
            first, last, step = found.groups()
            tasks += (int(last or first) - int(first)) // int(step or 1) + 1
    return max(0, min(tasks, int(throttle) - running)) if throttle else tasks


def changes(
    groups: Sequence[Group], waiting: Iterable[Waiting], others: Mapping[str, int], idle_s: float
) -> dict[str, Change]:
    """Return what to change by group. `others` are the nodes of a partition that are in none of these groups; `idle_s` is how
    long a machine stays without a job."""
    needs = _needs(groups, waiting, others)
    return {group.name: _change(group, needs[group.name], idle_s) for group in groups}


def _needs(groups: Sequence[Group], waiting: Iterable[Waiting], others: Mapping[str, int]) -> dict[str, int]:
    """Share the nodes that jobs wait for among the groups of their partitions, the first group first."""
    needs = {group.name: 0 for group in groups}
    for job in waiting:
        fitting = [group for group in groups if group.partition in job.partitions]
        most = sum(group.most for group in fitting) + max((others.get(name, 0) for name in job.partitions), default=0)
        nodes = _nodes_of(job, fitting)
        if nodes > most:
            continue  # It can never start, and nodes would stay for it.
        left = nodes * job.tasks
        for group in fitting:
            taken = min(left, group.most - needs[group.name] - len(_of(group, KEPT)))
            if taken > 0:
                needs[group.name] += taken
                left -= taken
    return needs


def _nodes_of(job: Waiting, groups: Sequence[Group]) -> int:
    """Return how many nodes a job needs at least: of one without --nodes Slurm says one while its partition is empty.

    Where a group's processors are not known, its machines may be the larger ones.
    """
    cpus = [group.cpus or 0 for group in groups]
    return max(job.nodes, math.ceil(job.cpus / max(cpus))) if cpus and all(cpus) else job.nodes


def _change(group: Group, need: int, idle_s: float) -> Change:
    idle, live = _of(group, IDLE), len(group.machines)
    base = max(group.desired, live)
    lost = tuple(machine for machine in _of(group, BOOTING) if machine.for_s >= BOOTED_WITHIN_S)
    due = sorted((one for one in idle if one.for_s >= idle_s), key=lambda one: -one.for_s)
    if group.held or lost:
        desired, spare = live, len(due)
    else:
        missing = need - len(idle) - len(_of(group, BOOTING)) - (base - live)
        desired, spare = base, max(0, len(idle) - need)
        if missing > 0:
            # One more for each that ends now: it counts until then.
            desired = max(base, min(group.most, base + missing))
        elif group.unfilled_s >= idle_s:
            desired = max(live, base + missing)
    ending = _of(group, ENDING)
    ended = (*(one for one in ending if not one.for_s), *due[:spare])
    freed = tuple(one for one in ending if one.for_s)
    if group.unproven:
        desired = min(desired, max(live, 1))
    # The most may have become less than there are.
    desired = min(desired, group.most)
    return Change(None if desired == group.desired else desired, ended, freed, lost)


def _of(group: Group, state: str) -> list[Machine]:
    return [machine for machine in group.machines if machine.state == state]
