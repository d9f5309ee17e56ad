"""slurm.conf, gres.conf and cgroup.conf as text, from the Cluster and its machines. Pure, and linear in the machines.

Keys and values: https://slurm.schedmd.com/slurm.conf.html, gres.conf.html and cgroup.conf.html there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lustrain.cluster import Cluster
from node_setup.agent.owned import AGENT
from node_setup.agent.slurm import gres, paths
from node_setup.slurm import accounting
from node_setup.slurm.machines import SlurmMachine, Version

CREDENTIAL_S = 30
"""A job that is requeued waits until its old credential has ended; Slurm's own 120 s would be two minutes after each notice."""
LOST_AFTER_S = 60
"""Slurm's own 300 s would leave the other nodes of a run idle for five minutes after each lost one."""
SCHEDULER_PARAMETERS = "nohold_on_prolog_fail"
"""A job that a node does not start, as where its old script still lives, would wait until a person releases it. Slurm drains
that node. The name speaks of prologs alone; slurmd reads it whenever a batch script does not start (`_launch_job_fail` of
https://github.com/SchedMD/slurm/blob/slurm-22.05/src/slurmd/slurmd/req.c)."""
HEALTH_CHECK = "lustrain-health"
HEALTH_INTERVAL_S = 300
CGROUP_V2_SINCE: Version = (22, 5)
CGROUP_DISABLED_SINCE: Version = (24, 5)
"""The value `disabled` of CgroupPlugin."""

HELD = ("ConstrainCores=yes", "ConstrainDevices=yes", "ConstrainRAMSpace=yes")
"""Of cgroup.conf, where jobs are held by control groups."""

HEALTH_SCRIPT = f"""#!/bin/sh
{paths.HEADER}# slurmd runs it while the node is idle: a node with a fault of its own is drained with the reason.
[ -r {AGENT} ] || exit 0
exec /usr/bin/python3 -I -S {AGENT} slurm-health >/dev/null
"""


def files(cluster: Cluster, machines: Sequence[SlurmMachine]) -> dict[str, str]:
    """Return the files of /etc/slurm, the same for all machines, by name."""
    held = holds_by_cgroups(machines)
    return {
        "slurm.conf": slurm_conf(cluster, machines, by_cgroups=held),
        "gres.conf": gres_conf(machines),
        "cgroup.conf": cgroup_conf(machines, by_cgroups=held),
        HEALTH_CHECK: HEALTH_SCRIPT,
    }


def holds_by_cgroups(machines: Sequence[SlurmMachine]) -> bool:
    """Check that every node for jobs has control groups which its release of Slurm can use: the plugins are the cluster's."""
    return all(
        machine.facts["cgroup"] == "v1" or (machine.facts["cgroup"] == "v2" and machine.version >= CGROUP_V2_SINCE)
        for machine in machines
        if machine.computes
    )


def slurm_conf(cluster: Cluster, machines: Sequence[SlurmMachine], *, by_cgroups: bool) -> str:
    assert cluster.slurm is not None
    settings = replaced(_settings(cluster, machines, by_cgroups), cluster.slurm.settings)
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += ["", *(_node_line(cluster, machine) for machine in machines if machine.computes)]
    return paths.HEADER + "\n".join([*lines, "", *_partition_lines(cluster, machines)]) + "\n"


def _settings(cluster: Cluster, machines: Sequence[SlurmMachine], by_cgroups: bool) -> dict[str, str]:
    head = next(machine for machine in machines if machine.controls)
    gpus = any(machine.facts["gpus"] for machine in machines if machine.computes)
    host = {"SlurmctldHost": f"{head.host}({head.node.address})"}
    shared = shared_settings(by_cgroups=by_cgroups, gpus=gpus)
    if cluster.slurm and cluster.slurm.accounting:
        shared |= {"AccountingStorageHost": head.node.address, **accounting.settings(by_cgroups=by_cgroups, gpus=gpus)}
    return {"ClusterName": cluster_name(cluster.name), **host, **shared}


def cluster_name(name: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())


def replaced(settings: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with the user's, whose case does not matter."""
    names = {name.lower(): name for name in settings}
    return {**settings, **{names.get(name.lower(), name): value for name, value in others.items()}}


def shared_settings(*, by_cgroups: bool, gpus: bool) -> dict[str, str]:
    """Return what every Slurm of ours has, whatever its nodes are."""
    return {
        "AuthType": "auth/munge",
        "AuthInfo": f"cred_expire={CREDENTIAL_S}",
        "SlurmUser": "slurm",
        "StateSaveLocation": paths.STATE,
        "SlurmdSpoolDir": paths.SPOOL,
        "SlurmctldLogFile": f"{paths.LOGS}/slurmctld.log",
        "SlurmdLogFile": f"{paths.LOGS}/slurmd.log",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": SCHEDULER_PARAMETERS,
        "ProctrackType": "proctrack/cgroup" if by_cgroups else "proctrack/linuxproc",
        "TaskPlugin": "task/affinity,task/cgroup" if by_cgroups else "task/none",
        "JobAcctGatherType": "jobacct_gather/cgroup" if by_cgroups else "jobacct_gather/none",
        "MpiDefault": "none",
        # A login's small limit of locked memory would come along to the nodes, and EFA cannot register its buffers under it.
        "PropagateResourceLimitsExcept": "MEMLOCK",
        "SlurmdTimeout": str(LOST_AFTER_S),
        # A node that is back registers by itself, whatever made it DOWN, a reboot too.
        "ReturnToService": "2",
        "JobRequeue": "1",
        "JobFileAppend": "1",
        # Shorter, and the nodes that outlive a lost one are drained with "Kill task failed" while their ranks save.
        "UnkillableStepTimeout": "180",
        "HealthCheckProgram": f"{paths.FOLDER}/{HEALTH_CHECK}",
        "HealthCheckInterval": str(HEALTH_INTERVAL_S),
        "HealthCheckNodeState": "IDLE",
        **({"GresTypes": "gpu"} if gpus else {}),
    }


def _node_line(cluster: Cluster, machine: SlurmMachine) -> str:
    cpu, facts = machine.facts["cpu"], machine.facts
    words = {
        "NodeName": machine.host,
        "NodeAddr": machine.node.address,
        "CPUs": cpu["cpus"],
        "Sockets": cpu["sockets"],
        "CoresPerSocket": cpu["cores"],
        "ThreadsPerCore": cpu["threads"],
        "RealMemory": gres.real_memory(facts["memory_mib"]),
        **({"Gres": gres.gres(facts["gpus"])} if facts["gpus"] else {}),
        "Feature": ",".join(features(cluster, machine.group)),
    }
    return " ".join(f"{name}={value}" for name, value in words.items())


def features(cluster: Cluster, group: str) -> list[str]:
    """Return what jobs may ask for by --constraint: the group, its type, how it is paid for, its zone."""
    paid = cluster.groups[group].capacity or cluster.capacity
    return gres.features([group, cluster.groups[group].type, paid.mode, cluster.zone_id])


def partition_lines(nodes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the line of each partition, by its nodes or sets of nodes; the first is the default."""
    return [
        f"PartitionName={name} Nodes={','.join(names)} Default={'NO' if at else 'YES'} MaxTime=INFINITE State=UP"
        for at, (name, names) in enumerate(nodes.items())
    ]


def _partition_lines(cluster: Cluster, machines: Sequence[SlurmMachine]) -> list[str]:
    """One for each group with nodes for jobs."""
    hosts: dict[str, list[str]] = {}
    for machine in machines:
        if machine.computes:
            hosts.setdefault(cluster.groups[machine.group].partition or machine.group, []).append(machine.host)
    return partition_lines(hosts)


def gres_conf(machines: Sequence[SlurmMachine]) -> str:
    """Nodes with the same devices share their lines."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for machine in machines:
        if machine.computes and machine.facts["gpus"]:
            hosts.setdefault(tuple(gres.device_words(machine.facts["gpus"])), []).append(machine.host)
    lines = [f"NodeName={','.join(names)} {words}" for rows, names in hosts.items() for words in rows]
    return paths.HEADER + "".join(f"{line}\n" for line in lines)


def cgroup_conf(machines: Sequence[SlurmMachine], *, by_cgroups: bool) -> str:
    """Without control groups their plugin is named or disabled, since Slurm looks for one at its start whatever uses it."""
    nodes = [machine for machine in machines if machine.computes]
    oldest = min((machine.version for machine in machines), default=CGROUP_V2_SINCE)
    kinds = {machine.facts["cgroup"] for machine in nodes}
    lines = []
    if not by_cgroups and oldest >= CGROUP_V2_SINCE:
        lines = [f"CgroupPlugin={'disabled' if oldest >= CGROUP_DISABLED_SINCE else 'cgroup/v1'}"]
    elif by_cgroups:
        plugin = f"cgroup/{kinds.pop()}" if len(kinds) == 1 else "autodetect"
        lines = [f"CgroupPlugin={plugin}"] if oldest >= CGROUP_V2_SINCE else []
        lines += HELD
    return paths.HEADER + "".join(f"{line}\n" for line in lines)
