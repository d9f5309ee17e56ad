"""Machines whose facts Slurm's files are planned from: the files of the kernel and driver below a folder, read by the agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lustrain.cluster import Cluster, parse
from node_setup.agent.slurm import facts
from node_setup.fleet.hosts import Node
from node_setup.slurm import conf
from node_setup.slurm.machines import Report, SlurmMachine, controller_of, plan_machines
from tests.node_setup.agents import BareHost

GROUP = {"type": "c7i.2xlarge", "count": 2}


def plant(root: Path, sockets: int, cores: int, threads: int, gpus: int = 0) -> BareHost:
    """Write the files of a machine's processors, numbered as Linux does: all first threads of the cores come first. The GPUs
    are shared out among the sockets, in order."""
    host, count = BareHost(root), sockets * cores
    for cpu in range(count * threads):
        socket, core = divmod(cpu % count, cores)
        host.write(f"{facts.CPUS}/cpu{cpu}/topology/physical_package_id", f"{socket}\n")
        host.write(f"{facts.CPUS}/cpu{cpu}/topology/core_id", f"{core}\n")
    host.write(f"{facts.CPUS}/cpufreq/boost", "1\n")
    host.write("/proc/sys/kernel/hostname", "node\n")
    for gpu in range(gpus):
        slot, socket = f"0000:{0x53 + gpu:02x}:00.0", gpu * sockets // gpus
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nBus Location: \t {slot}\nDevice Minor: \t {gpu}\n"
        host.write(f"{facts.NVIDIA}/{slot}/information", text)
        near = [
            f"{socket * cores + count * thread}-{socket * cores + count * thread + cores - 1}"
            for thread in range(threads)
        ]
        host.write(f"/sys/bus/pci/devices/{slot}/local_cpulist", ",".join(near) + "\n")
    return host


def report(name: str, host: BareHost, **more: Any) -> Report:
    """What the agent of that machine would tell, with 64 GiB and Debian 12's Slurm unless `more` says otherwise."""
    told = facts.collect(host) | {"host": name, "memory_mib": 65536, "cgroup": "v2", "offered": "22.05.8"}
    told |= {"munge_key": "0" * 64, "munge": "ok"}
    idle = {"load": "not-found", "active": "inactive", "enabled": None}
    told |= {"units": dict.fromkeys(facts.UNITS, idle)}
    return Report(Node(name, f"10.0.0.{int(name.lstrip('abcdefghijklmnopqrstuvwxyz')) + 10}"), told | more)


def cluster(groups: dict[str, Any] | None = None, slurm: dict[str, Any] | None = None, **more: Any) -> Cluster:
    """Return a Cluster of machines whose controller is node1."""
    document = {
        "name": "lab",
        "backend": "machines",
        "nodes": {"addresses": ["10.0.0.11", "10.0.0.12", "10.0.0.13"]},
        "reach": {"via": "ssh"},
        "groups": groups or {"train": GROUP},
        "runs_uri": "/fsx/runs",
        "capacity": {"mode": "owned"},
        "slurm": {"controller": "node1"} | (slurm or {}),
    }
    return parse(document | more)


def machines_or_problems(there: Cluster, reports: list[Report]) -> list[Any]:
    """Nodes belong to the only group unless a report says more."""
    only = next(iter(there.groups)) if len(there.groups) == 1 else None
    told = [Report(_in(one.node, only), one.facts, one.clock_low_s, one.clock_high_s) for one in reports]
    controller = controller_of(there, [one.node for one in told])
    assert isinstance(controller, Node), controller
    return list(plan_machines(there, controller, told))


def machines(there: Cluster, reports: list[Report]) -> list[SlurmMachine]:
    made = machines_or_problems(there, reports)
    assert all(isinstance(one, SlurmMachine) for one in made), made
    return made


def _in(node: Node, group: str | None) -> Node:
    return Node(node.name, node.address, node.group or group)


def small_machines(root: Path) -> list[Report]:
    """Three machines of eight processors."""
    return [report(f"node{number}", plant(root / str(number), 1, 4, 2)) for number in (1, 2, 3)]


def cpu_files(root: Path) -> dict[str, str]:
    there = cluster()
    return conf.files(there, machines(there, small_machines(root)))


def p5_files(root: Path) -> dict[str, str]:
    """A controller of its own group, and two nodes on spot, all with Ubuntu 24.04's Slurm; one setting is the user's."""
    installed = dict.fromkeys(facts.DAEMONS, "23.11.4")
    told = [report("node1", plant(root / "head", 1, 1, 2), group="head", installed=installed)]
    told += [
        report(f"node{number}", plant(root / str(number), 2, 48, 2, gpus=8), group="train", offered="23.11.4")
        for number in (2, 3)
    ]
    groups = {
        "head": {"type": "m7i.large", "count": 1, "role": "controller"},
        "train": {"type": "p5.48xlarge", "count": 2, "gpus": 8, "partition": "p5"},
    }
    there = cluster(groups, {"settings": {"slurmdtimeout": "30"}}, capacity={"mode": "spot"}, zone_id="use1-az4")
    return conf.files(there, machines(there, told))
