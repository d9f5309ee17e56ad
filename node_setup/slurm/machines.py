"""The machines of a Slurm: what each is there for, and what keeps them from being one cluster. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from lustrain.cluster import Cluster
from lustrain.problem import Problem, problem
from node_setup.fleet.hosts import Node

Duty = Literal["controller", "compute", "client"]
Version = tuple[int, int]

OLDEST: Version = (21, 8)
"""Ubuntu 22.04's. The oldest on which a run was rehearsed is 22.05 (Debian 12)."""
RELEASES: tuple[Version, ...] = (
    (20, 11), (21, 8), (22, 5), (23, 2), (23, 11), (24, 5), (24, 11), (25, 5), (25, 11), (26, 5),
)  # fmt: skip
THREE_OLDER_SINCE: Version = (24, 11)
"""slurmctld understands nodes of the two releases before its own, since 24.11 of three: https://slurm.schedmd.com/upgrades.html"""
DAEMONS = ("slurmctld.service", "slurmd.service")
MOST_OFF_S = 10.0
"""Clocks may be so far apart: a job's credential is good for 30 s (`conf.CREDENTIAL_S`), and munge's for 300 s."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Report:
    """This is what a node's agent reported. Its clock was between `clock_low_s` and `clock_high_s` ahead of the operator's."""

    node: Node
    facts: Mapping[str, Any]
    clock_low_s: float = 0.0
    clock_high_s: float = 0.0


@dataclass(frozen=True)
class SlurmMachine:
    """This is one machine of the Slurm; `version` is of the daemon that it runs or will get."""

    node: Node
    host: str
    group: str
    duties: tuple[Duty, ...]
    version: Version
    facts: Mapping[str, Any]

    @property
    def computes(self) -> bool:
        return "compute" in self.duties

    @property
    def controls(self) -> bool:
        return "controller" in self.duties


def controller_of(cluster: Cluster, nodes: Sequence[Node]) -> Node | Problem:
    """Return the controller's node, or what is wrong with its name."""
    path, names = "cluster.slurm.controller", ", ".join(node.name for node in nodes[:8])
    named = cluster.slurm.controller if cluster.slurm else None
    if cluster.backend != "machines":
        fix = "use the Slurm that the backend brings, or start the trainer on the nodes"
        if cluster.backend == "ec2":
            fix = "`scheduler` of the stack sets Slurm up as nodes boot; fab node-verify says what is not in order"
        return problem("cluster.backend", cluster.backend, "gets no Slurm by this task", allowed="machines", fix=fix)
    if named is None:
        return problem(path, None, "no controller is named", allowed=names, fix="name the machine that runs slurmctld")
    match = [node for node in nodes if named in (node.name, node.address)]
    return match[0] if match else problem(path, named, "is not among the machines", allowed=names)


def plan_machines(cluster: Cluster, controller: Node, reports: Sequence[Report]) -> list[SlurmMachine] | list[Problem]:
    """Return the machines with their duties, or one line for each thing that keeps them from being a Slurm."""
    problems = [*_partition_problems(cluster), *_own_problems(cluster, controller, reports)]
    problems += _joint_problems(controller, reports)
    if problems:
        return problems
    made = []
    for report in reports:
        group, duties = _group(cluster, report), _duties(cluster, controller, report)
        made.append(
            SlurmMachine(report.node, report.facts["host"], group, duties, _version(report, duties), report.facts)
        )
    if not any(machine.computes for machine in made):
        fix = "name more machines of a group with role worker, or set controller_runs_jobs to true"
        return [problem("cluster.nodes", controller.name, "leaves no machine for jobs", fix=fix)]
    return made


def release(text: str | None) -> Version | None:
    """Return year and month of a release of Slurm: (22, 5) of `22.05.8`."""
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def _duties(cluster: Cluster, controller: Node, report: Report) -> tuple[Duty, ...]:
    assert cluster.slurm is not None
    controls, group = report.node is controller, cluster.groups.get(_group(cluster, report))
    computes = group is not None and group.role == "worker" and (not controls or cluster.slurm.controller_runs_jobs)
    if controls:
        return ("controller", "compute") if computes else ("controller",)
    return ("compute",) if computes else ("client",)


def _group(cluster: Cluster, report: Report) -> str:
    group = report.node.group or report.facts.get("group") or ""
    return group if group in cluster.groups else ""


def _version(report: Report, duties: tuple[Duty, ...] = ()) -> Version:
    """Return the release of what the node will run: of an installed daemon, else of what its distribution offers."""
    installed = report.facts["installed"]
    daemon = installed["slurmctld"] if "controller" in duties else installed["slurmd"]
    return release(daemon) or release(report.facts["offered"]) or (0, 0)


def _partition_problems(cluster: Cluster) -> Iterator[Problem]:
    """`fab train` names a group's partition; only where there is one group, Slurm's default partition is that."""
    workers = {name: group for name, group in cluster.groups.items() if group.role == "worker"}
    for name, group in workers.items():
        if group.partition is None and len(workers) > 1:
            why = "is missing, and there are several groups of workers"
            yield problem(f"cluster.groups.{name}.partition", None, why, fix=f"name one, like {name}")


def _own_problems(cluster: Cluster, controller: Node, reports: Sequence[Report]) -> Iterator[Problem]:
    for report in reports:
        facts, name = report.facts, report.node.name
        if not _HOST.fullmatch(facts["host"] or "") or facts["host"] == "localhost":
            yield problem(
                f"host name of {name}", facts["host"], "is no name of a node", fix="hostnamectl set-hostname NAME"
            )
        if not _group(cluster, report):
            fix = f"write `{name} GROUP` into a file and give it by --hosts-file, or run fab node-tune first"
            why = "is not known, and the Cluster has more than one"
            yield problem(f"group of {name}", report.node.group, why, allowed=", ".join(cluster.groups), fix=fix)
        if not facts["cpu"] or not facts["memory_mib"]:
            yield problem(
                f"processors and memory of {name}", None, "could not be read", fix="mount /proc and /sys there"
            )
        if facts["conf"] and not facts["conf"]["ours"]:
            fix = "take its Slurm away, or leave the machine out"
            why = "belongs to a Slurm that is not ours"
            yield problem(f"/etc/slurm/slurm.conf of {name}", facts["conf"]["cluster"], why, fix=fix)
        elif not facts["conf"]:
            yield from _foreign_daemon_problems(report)
        yield from _version_problems(report)
        if "compute" in _duties(cluster, controller, report):
            yield from _gpu_problem(cluster, report)


def _foreign_daemon_problems(report: Report) -> Iterator[Problem]:
    """Without our slurm.conf a daemon belongs to another Slurm: one of slurmd's --conf-server, or with its files elsewhere."""
    for unit in DAEMONS:
        active, path = report.facts["units"][unit]["active"], f"{unit} of {report.node.name}"
        if active is None:
            yield problem(path, None, "could not be read", fix=f"systemctl show {unit} there has to answer")
        elif active not in ("inactive", "failed"):
            fix = "take its Slurm away, or leave the machine out"
            yield problem(path, active, "belongs to a Slurm that is not ours", fix=fix)


def _version_problems(report: Report) -> Iterator[Problem]:
    name, version = report.node.name, _version(report)
    if version == (0, 0):
        fix = "apt-get update there (Ubuntu: with `universe`), or install slurmd and slurmctld"
        yield problem(f"Slurm of {name}", None, "is neither installed nor known to apt", fix=fix)
    elif version < OLDEST:
        fix = "use Ubuntu 22.04, Debian 12 or later"
        yield problem(f"Slurm of {name}", _shown(version), "is too old", allowed=f"{_shown(OLDEST)} or newer", fix=fix)


def _gpu_problem(cluster: Cluster, report: Report) -> Iterator[Problem]:
    group, seen = cluster.groups[_group(cluster, report)], len(report.facts["gpus"])
    if group.gpus != seen:
        fix = "install or mend NVIDIA's driver there (other makers' devices are not planned), or correct the Cluster"
        yield problem(
            f"GPUs of {report.node.name}", seen, "is not what its group has", allowed=str(group.gpus), fix=fix
        )


def _joint_problems(controller: Node, reports: Sequence[Report]) -> Iterator[Problem]:
    by_host: dict[str, str] = {}
    for report in reports:
        host, name = str(report.facts["host"]), report.node.name
        if (first := by_host.setdefault(host, name)) != name:
            yield problem(f"host name of {name}", host, f"{first} has it too", fix="give each machine its own name")
        if len(reports) > 1 and _is_loopback(report.node.address):
            yield problem(f"address of {name}", report.node.address, "is this machine's own for every machine")
    head = next(report for report in reports if report.node is controller)
    newest = _version(head, ("controller",))
    for report in reports:
        yield from _clock_problem(head, report)
        if (0, 0) in (newest, _version(report)) or report is head:
            continue
        older = 3 if newest >= THREE_OLDER_SINCE else 2
        ages = [RELEASES.index(version) for version in (_version(report), newest) if version in RELEASES]
        if _version(report) > newest or (len(ages) == 2 and ages[1] - ages[0] > older):
            allowed = f"at most {_shown(newest)}, the controller's, and at most {older} releases older"
            fix = "run the same system on all machines"
            yield problem(f"Slurm of {report.node.name}", _shown(_version(report)), "does not fit", allowed, fix)


def _clock_problem(head: Report, report: Report) -> Iterator[Problem]:
    """Both clocks are known but for the time that the answers took; only what is off beyond that counts."""
    off = max(report.clock_low_s - head.clock_high_s, head.clock_low_s - report.clock_high_s)
    if off > MOST_OFF_S:
        fix = "fab node-tune, or systemctl restart chrony there"
        allowed = f"at most {MOST_OFF_S:g} s"
        yield problem(f"clock of {report.node.name}", f"{off:.0f} s", "is off the controller's", allowed, fix)


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _shown(version: Version) -> str:
    return f"{version[0]}.{version[1]:02d}"
