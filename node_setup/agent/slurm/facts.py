"""The facts from which Slurm's configuration follows, and what of Slurm is on the node already."""

from __future__ import annotations

import json
import os
import re
import time
from hashlib import sha256
from typing import Any

from node_setup.agent import owned
from node_setup.agent.facts.machine import parse_os_release
from node_setup.agent.host import Host
from node_setup.agent.slurm import paths

CPUS = "/sys/devices/system/cpu"
NVIDIA = "/proc/driver/nvidia/gpus"
CGROUPS = "/sys/fs/cgroup"
NEEDED_V1 = ("cpuset", "devices", "freezer", "memory")
"""Hierarchies that Slurm's plugins use: https://slurm.schedmd.com/cgroup_v1.html"""
DAEMONS = ("slurmctld", "slurmd")
UNITS = ("munge.service", "slurmctld.service", "slurmd.service")


def collect(host: Host) -> dict[str, Any]:
    """Return the facts as plain JSON data; one that could not be read is None. Of the munge key only the digest is shown."""
    cores = cores_of(host)
    key = read_bytes(host, paths.MUNGE_KEY)
    return {
        "host": (host.read("/proc/sys/kernel/hostname") or "").strip().partition(".")[0] or None,
        "group": _group(host),
        "os": parse_os_release(host.read("/etc/os-release") or host.read("/usr/lib/os-release") or ""),
        "cpu": shape(cores),
        "memory_mib": memory_mib(),
        "gpus": gpus(host, cores),
        "cgroup": cgroup(host),
        "installed": {program: _version(host, program) for program in DAEMONS},
        "offered": _offered(host),
        "conf": _conf(host),
        "munge_key": sha256(key).hexdigest() if key else None,
        "munge": _munge(host),
        "units": {unit: unit_state(host, unit) for unit in UNITS},
        "clock": time.time(),
    }


def cores_of(host: Host) -> dict[tuple[int, int], list[int]]:
    """Return the processors of each core that is online, by socket and core as the kernel numbers them, in that order.

    Its position in this order is the number that Slurm knows a core by: https://slurm.schedmd.com/gres.conf.html#OPT_Cores
    """
    cores: dict[tuple[int, int], list[int]] = {}
    for name in host.names(CPUS):
        if re.fullmatch(r"cpu\d+", name):
            socket = _number(host, f"{CPUS}/{name}/topology/physical_package_id")
            core = _number(host, f"{CPUS}/{name}/topology/core_id")
            if socket is not None and core is not None:
                cores.setdefault((socket, core), []).append(int(name[3:]))
    return dict(sorted(cores.items()))


def shape(cores: dict[tuple[int, int], list[int]]) -> dict[str, int] | None:
    """Return processors, sockets, cores of a socket and threads of a core; None where the kernel does not tell them."""
    if not cores:
        return None
    sockets = len({socket for socket, _ in cores})
    cpus = sum(map(len, cores.values()))
    return {"cpus": cpus, "sockets": sockets, "cores": len(cores) // sockets, "threads": cpus // len(cores)}


def gpus(host: Host, cores: dict[tuple[int, int], list[int]]) -> list[dict[str, Any]]:
    """Return NVIDIA's GPUs by their device files, as the driver lists them, each with the cores that are local to it."""
    devices = []
    for slot in host.names(NVIDIA):
        text = host.read(f"{NVIDIA}/{slot}/information") or ""
        minor, model = re.search(r"^Device Minor:\s*(\d+)", text, re.M), re.search(r"^Model:\s*(.+)$", text, re.M)
        if minor:
            near = numbers(host.read(f"/sys/bus/pci/devices/{slot.lower()}/local_cpulist") or "")
            local = [at for at, cpus in enumerate(cores.values()) if near & set(cpus)]
            devices.append({"minor": int(minor[1]), "type": gpu_type(model[1] if model else ""), "cores": local})
    return sorted(devices, key=lambda gpu: int(gpu["minor"]))


def gpu_type(model: str) -> str:
    """Return the name of a GPU as a type of Slurm: `h100` of `NVIDIA H100 80GB HBM3`, `gpu` where there is no name."""
    words = [word for word in re.findall(r"[a-z0-9]+", model.lower()) if word not in ("nvidia", "tesla")]
    return words[0] if words else "gpu"


def numbers(ranges: str) -> set[int]:
    """Return the numbers in a list of the kernel: 0, 1, 2 and 5 of `0-2,5`."""
    listed: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        listed.update(range(int(first), int(last or first) + 1))
    return listed


def cgroup(host: Host) -> str | None:
    """Return v2, or v1 where all hierarchies are there that Slurm needs; None where jobs cannot be held by control groups."""
    if host.exists(f"{CGROUPS}/cgroup.controllers"):
        return "v2"
    return "v1" if all(host.exists(f"{CGROUPS}/{name}/tasks") for name in NEEDED_V1) else None


def unit_state(host: Host, unit: str) -> dict[str, str | None]:
    done = host.run(("systemctl", "show", "--property=LoadState,ActiveState,UnitFileState", "--", unit))
    shown = dict(line.split("=", 1) for line in done.out.splitlines() if "=" in line) if done.ok else {}
    return {"load": shown.get("LoadState"), "active": shown.get("ActiveState"), "enabled": shown.get("UnitFileState")}


def read_bytes(host: Host, path: str) -> bytes | None:
    """Return the file's bytes; None where it cannot be read."""
    try:
        return host.path(path).read_bytes()
    except OSError:
        return None


def memory_mib() -> int | None:
    """Return the memory as slurmd will report it, which asks the C library and not /proc/meminfo."""
    bytes_ = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return bytes_ // 2**20 if bytes_ > 0 else None


def _group(host: Host) -> str | None:
    """Return the group that the node was last tuned for."""
    try:
        group = json.loads(host.read(owned.TUNING) or "{}").get("group")
    except (ValueError, AttributeError):
        return None
    return group if isinstance(group, str) else None


def _number(host: Host, path: str) -> int | None:
    text = (host.read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _version(host: Host, program: str) -> str | None:
    """Return the release, like 22.05.8; distributions put other words before it."""
    if host.which(program) is None:
        return None
    match = re.search(r"\d+\.\d+(\.\d+)?", host.run((program, "-V")).out)
    return match[0] if match else None


def release_here(host: Host) -> tuple[int, int] | None:
    """Return year and month of the release that is installed, else of the one that apt would install."""
    known = (_version(host, program) for program in (*DAEMONS, "scontrol"))
    text = next((version for version in known if version), None) or _offered(host)
    return None if text is None else (int(text.split(".")[0]), int(text.split(".")[1]))


def _offered(host: Host) -> str | None:
    """Return the release that apt would install; None where apt is missing or knows none."""
    if host.which("apt-cache") is None:
        return None
    match = re.search(r"Candidate:\s*(\d+\.\d+(\.\d+)?)", host.run(("apt-cache", "policy", "slurmd"), 60).out)
    return match[1] if match else None


def _conf(host: Host) -> dict[str, Any] | None:
    text = host.read(paths.CONF)
    if text is None:
        return None
    name = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.M | re.I)
    return {"ours": text.startswith(paths.HEADER), "cluster": name[1] if name else None}


def _munge(host: Host) -> str | None:
    """Return `ok` where the node decodes its own credential, else what munge complains of; None where it is not installed."""
    if host.which("munge") is None:
        return None
    made = host.run(("munge", "--no-input"))
    read = host.run(("unmunge", "--metadata=/dev/null"), stdin=made.out) if made.ok else made
    return "ok" if read.ok else read.complaint
