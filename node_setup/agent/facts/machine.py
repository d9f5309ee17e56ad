"""The machine: name and boot, operating system, kernel, processors, memory, disk space."""

from __future__ import annotations

import os
import re
from typing import Any

from node_setup.agent.facts.reading import MachineReading, integer, space, start_ticks

EMPTY: dict[str, Any] = {"host": {}, "os": {}, "kernel": {}, "cpu": {}, "memory": {}, "disk": {}, "boot_outcome": None}
DISKS = ("/", "/etc")
BOOT_OUTCOME = "/var/lib/lustrain/boot"
"""infra/plan/nodes/first_boot.sh writes here how its last run ended: `ready`, or `failed` and the step."""
_HEAD_BYTES = 4096


def collect(reading: MachineReading) -> dict[str, Any]:
    return {
        "host": _host(reading),
        "os": parse_os_release(reading.host.read("/etc/os-release") or reading.host.read("/usr/lib/os-release") or ""),
        "kernel": _kernel(reading),
        "cpu": _cpu(reading),
        "memory": _memory(reading),
        "disk": {path: _disk(reading, path) for path in DISKS},
        "boot_outcome": reading.text(BOOT_OUTCOME),
    }


def _host(reading: MachineReading) -> dict[str, Any]:
    return {
        "name": reading.text("/proc/sys/kernel/hostname"),
        "boot_id": reading.text("/proc/sys/kernel/random/boot_id"),
        "pid1_start": start_ticks(reading.host.read("/proc/1/stat") or ""),
    }


def parse_os_release(text: str) -> dict[str, Any]:
    """Return id, version and family; `family` decides where files lie: debian, rhel or other."""
    pairs = re.findall(r"^([A-Z_]+)=[\"']?([^\"'\n]*)[\"']?$", text, re.MULTILINE)
    values = dict(pairs)
    names = {values.get("ID", ""), *values.get("ID_LIKE", "").split()}
    family = "other"
    if names & {"debian", "ubuntu"}:
        family = "debian"
    elif names & {"rhel", "fedora", "centos", "amzn"}:
        family = "rhel"
    return {"id": values.get("ID") or None, "version": values.get("VERSION_ID") or None, "family": family}


def _kernel(reading: MachineReading) -> dict[str, Any]:
    return {
        "release": reading.text("/proc/sys/kernel/osrelease"),
        "arch": reading.text("/proc/sys/kernel/arch") or os.uname().machine,
        "cmdline": parse_cmdline(reading.host.read("/proc/cmdline") or ""),
        "thp": bracketed_choice(reading.host.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""),
    }


def parse_cmdline(text: str) -> dict[str, str]:
    """Return the options by name; the last of a name wins as in the kernel, and one without a value has an empty one."""
    words = re.findall(r'(?:[^\s"]|"[^"]*"?)+', text)
    pairs = (word.partition("=") for word in words)
    return {name: value.strip('"') for name, _, value in pairs}


def bracketed_choice(text: str) -> str | None:
    """Return the bracketed choice of a kernel file, e.g. `madvise` of `always [madvise] never`."""
    match = re.search(r"\[([^\]\s]+)\]", text)
    return match[1] if match else None


def _cpu(reading: MachineReading) -> dict[str, Any]:
    head = _head(reading, "/proc/cpuinfo")
    return {
        "count": count_of(reading.host.read("/sys/devices/system/cpu/online") or "") or os.cpu_count(),
        "vendor": _field(head, "vendor_id") or _field(head, "CPU implementer"),
        "model": _field(head, "model name") or _field(head, "CPU part"),
    }


def _head(reading: MachineReading, path: str) -> str:
    """Read the beginning of a file that the kernel writes as it is read: all of it takes milliseconds on 192 processors."""
    try:
        with open(reading.host.path(path), "rb", buffering=0) as file:
            return file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\s*:[ \t]*(\S.*?)\s*$", text, re.MULTILINE)
    return match[1] if match else None


def count_of(ranges: str) -> int | None:
    """Count the numbers in a list of the kernel: 4 of `0-2,5`. None where it is not a list."""
    total = 0
    for part in ranges.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            return None
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total


def _memory(reading: MachineReading) -> dict[str, Any]:
    values = parse_meminfo(reading.host.read("/proc/meminfo") or "")
    total, shm = values.get("MemTotal"), space(reading.host, "/dev/shm")
    return {
        "gib": None if total is None else round(total / 2**20, 2),
        "hugepages_total": values.get("HugePages_Total"),
        "hugepages_free": values.get("HugePages_Free"),
        "hugepage_kib": values.get("Hugepagesize"),
        "shm_gib": None if shm is None else round(shm.f_blocks * shm.f_frsize / 2**30, 2),
    }


def parse_meminfo(text: str) -> dict[str, int]:
    """Return values in KiB, or plain numbers where the kernel names no unit."""
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)(?: kB)?$", text, re.MULTILINE)}


def _disk(reading: MachineReading, path: str) -> dict[str, Any] | None:
    stats = space(reading.host, path)
    if stats is None:
        return None
    return {
        "free_bytes": stats.f_bavail * stats.f_frsize,
        # File systems without a table of inodes, such as btrfs, say that they have none at all.
        "free_inodes": integer(str(stats.f_favail)) if stats.f_files else None,
        "read_only": bool(stats.f_flag & os.ST_RDONLY),
    }
