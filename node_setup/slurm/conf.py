"""slurm.conf, gres.conf and cgroup.conf as text, from the Cluster and its machines. Pure, and linear in the machines.

Keys and values: https://slurm.schedmd.com/slurm.conf.html, gres.conf.html and cgroup.conf.html there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lustrain.cluster import Cluster
from node_setup.agent.owned import AGENT
from node_setup.agent.slurm import paths
from node_setup.slurm.members import Member, Version

CREDENTIAL_S = 30
"""A job that is requeued waits until its old credential has ended; Slurm's own 120 s would be two minutes after each notice."""
LOST_AFTER_S = 60
"""Slurm's own 300 s would leave the other nodes of a run idle for five minutes after each lost one."""
HEALTH_CHECK = "lustrain-health"
HEALTH_INTERVAL_S = 300
MEMORY_KEPT = 0.02
"""Not promised to jobs: a node that reports less than its line says, as after an update of the kernel, is drained."""
CGROUP_V2_SINCE: Version = (22, 5)
CGROUP_DISABLED_SINCE: Version = (24, 5)
"""The value `disabled` of CgroupPlugin."""

HEALTH_SCRIPT = f"""#!/bin/sh
{paths.HEADER}# slurmd runs it while the node is idle: a node with a fault of its own is drained with the reason.
[ -r {AGENT} ] || exit 0
exec /usr/bin/python3 -I -S {AGENT} slurm-health >/dev/null
"""


def files(cluster: Cluster, machines: Sequence[Member]) -> dict[str, str]:
    """Return the files of /etc/slurm, the same for all machines, by name."""
    held = holds_by_cgroups(machines)
    return {
        "slurm.conf": slurm_conf(cluster, machines, by_cgroups=held),
        "gres.conf": gres_conf(machines),
        "cgroup.conf": cgroup_conf(machines, by_cgroups=held),
        HEALTH_CHECK: HEALTH_SCRIPT,
    }


def holds_by_cgroups(machines: Sequence[Member]) -> bool:
    """Check that every node for jobs has control groups which its release of Slurm can use: the plugins are the cluster's."""
    return all(
        machine.facts["cgroup"] == "v1" or (machine.facts["cgroup"] == "v2" and machine.version >= CGROUP_V2_SINCE)
        for machine in machines
        if machine.computes
    )


def slurm_conf(cluster: Cluster, machines: Sequence[Member], *, by_cgroups: bool) -> str:
    assert cluster.slurm is not None
    settings = _settings(cluster, machines, by_cgroups)
    names = {name.lower(): name for name in settings}
    for name, value in cluster.slurm.settings.items():
        settings[names.get(name.lower(), name)] = value
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += ["", *(_node_line(cluster, machine) for machine in machines if machine.computes)]
    return paths.HEADER + "\n".join([*lines, "", *_partition_lines(cluster, machines)]) + "\n"


def _settings(cluster: Cluster, machines: Sequence[Member], by_cgroups: bool) -> dict[str, str]:
    head = next(machine for machine in machines if machine.controls)
    return {
        "ClusterName": re.sub(r"[^a-z0-9_-]", "-", cluster.name.lower()),
        "SlurmctldHost": f"{head.host}({head.node.address})",
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
        **({"GresTypes": "gpu"} if any(machine.facts["gpus"] for machine in machines if machine.computes) else {}),
    }


def _node_line(cluster: Cluster, machine: Member) -> str:
    cpu, facts = machine.facts["cpu"], machine.facts
    words = {
        "NodeName": machine.host,
        "NodeAddr": machine.node.address,
        "CPUs": cpu["cpus"],
        "Sockets": cpu["sockets"],
        "CoresPerSocket": cpu["cores"],
        "ThreadsPerCore": cpu["threads"],
        "RealMemory": int(facts["memory_mib"] * (1 - MEMORY_KEPT)),
        **({"Gres": gres(facts["gpus"])} if facts["gpus"] else {}),
        "Feature": ",".join(features(cluster, machine.group)),
    }
    return " ".join(f"{name}={value}" for name, value in words.items())


def gres(gpus: Sequence[Mapping[str, object]]) -> str:
    """Return the devices as a node's line and `scontrol` name them: `gpu:h100:8`."""
    types = [str(gpu["type"]) for gpu in gpus]
    return ",".join(f"gpu:{name}:{types.count(name)}" for name in dict.fromkeys(types))


def features(cluster: Cluster, group: str) -> list[str]:
    """Return what jobs may ask for by --constraint: the group, its type, how it is paid for, its zone."""
    paid = cluster.groups[group].capacity or cluster.capacity
    words = [group, cluster.groups[group].type, paid.mode, cluster.zone_id or ""]
    return [*dict.fromkeys(re.sub(r"[^A-Za-z0-9_.-]", "-", word) for word in words if word)]


def _partition_lines(cluster: Cluster, machines: Sequence[Member]) -> list[str]:
    """One for each group with nodes for jobs; the first is the default."""
    hosts: dict[str, list[str]] = {}
    for machine in machines:
        if machine.computes:
            hosts.setdefault(cluster.groups[machine.group].partition or machine.group, []).append(machine.host)
    return [
        f"PartitionName={name} Nodes={','.join(names)} Default={'NO' if at else 'YES'} MaxTime=INFINITE State=UP"
        for at, (name, names) in enumerate(hosts.items())
    ]


def gres_conf(machines: Sequence[Member]) -> str:
    """Nodes with the same devices share a line; devices in a row that are local to the same cores share it too."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for machine in machines:
        if machine.computes and machine.facts["gpus"]:
            hosts.setdefault(tuple(_device_words(machine.facts["gpus"])), []).append(machine.host)
    lines = [f"NodeName={','.join(names)} {words}" for rows, names in hosts.items() for words in rows]
    return paths.HEADER + "".join(f"{line}\n" for line in lines)


def _device_words(gpus: Sequence[Mapping[str, object]]) -> list[str]:
    runs: list[list[Mapping[str, object]]] = []
    for gpu in gpus:
        last = runs[-1][-1] if runs else None
        same = last is not None and all(last[key] == gpu[key] for key in ("type", "cores"))
        if same and last is not None and last["minor"] == int(str(gpu["minor"])) - 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return [_run_words(run) for run in runs]


def _run_words(run: Sequence[Mapping[str, object]]) -> str:
    first, last, cores = run[0]["minor"], run[-1]["minor"], run[0]["cores"]
    assert isinstance(cores, list)
    file = f"/dev/nvidia{first}" if first == last else f"/dev/nvidia[{first}-{last}]"
    return f"Name=gpu Type={run[0]['type']} File={file}" + (f" Cores={_ranges(cores)}" if cores else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as Slurm does: `0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cgroup_conf(machines: Sequence[Member], *, by_cgroups: bool) -> str:
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
        lines += ["ConstrainCores=yes", "ConstrainDevices=yes", "ConstrainRAMSpace=yes"]
    return paths.HEADER + "".join(f"{line}\n" for line in lines)
