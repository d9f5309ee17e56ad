"""What the collectors share: the host, the wanted facts, the errors, and lists that several of them need."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

from node_setup.agent.facts.wanted import Wanted
from node_setup.agent.host import Host


class Mount(NamedTuple):
    """This is one line of /proc/mounts."""

    source: str
    target: str
    fstype: str
    options: tuple[str, ...]


class Device(NamedTuple):
    """This is one PCI function; `kind` is the base class, 3 for a display controller and 2 for a network controller."""

    slot: str
    vendor: int
    device: int
    kind: int


class Process(NamedTuple):
    """This is a running program; `started` is in clock ticks since boot."""

    pid: int
    name: str
    command: tuple[str, ...]
    started: int


@dataclass
class MachineReading:
    """This holds what the collectors share while they read one machine."""

    host: Host
    wanted: Wanted
    mounts: list[Mount] = field(default_factory=list)
    devices: list[Device] | None = None
    processes: list[Process] = field(default_factory=list)
    loaded: frozenset[str] = frozenset()
    errors: list[dict[str, str]] = field(default_factory=list)

    def fault(self, where: str, why: str) -> None:
        """Note that a fact could not be read, in one line."""
        self.errors.append({"where": where, "why": " ".join(why.split())[:300]})

    def guarded(self, where: str, read: Callable[[], Any]) -> Any:
        """Return what `read` returns; None and an error of `where` where it fails: one fact may not cost the others."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 -- whatever a node shows, its other facts are still wanted
            self.fault(where, f"{type(error).__name__}: {error}")
            return None

    def output_of(self, where: str, command: Sequence[str], timeout: float = 10.0) -> str | None:
        """Return what a program printed; None where it failed, which is an error of `where`: its output then is not data."""
        done = self.host.run(command, timeout)
        if done.ok:
            return done.out
        self.fault(where, f"{' '.join(command[:3])}: {done.complaint}")
        return None

    def number(self, path: str) -> int | None:
        return integer(self.host.read(path))

    def text(self, path: str) -> str | None:
        """Return a file's content without the white space around it; None where the file is missing or empty."""
        return (self.host.read(path) or "").strip() or None

    def has(self, vendor: int, *kinds: int) -> bool | None:
        """Check for a vendor's PCI device, of one of the base classes if any is named; None where the bus is hidden."""
        if self.devices is None:
            return None
        return any(device.vendor == vendor and (not kinds or device.kind in kinds) for device in self.devices)


def start_reading(host: Host, wanted: Wanted) -> MachineReading:
    """Read the lists that several collectors need, once."""
    reading = MachineReading(host, wanted)
    reading.mounts = reading.guarded("mounts", lambda: parse_mounts(host.read("/proc/mounts") or "")) or []
    reading.devices = reading.guarded("devices", lambda: _pci(host))
    reading.processes = reading.guarded("processes", lambda: _processes(host)) or []
    reading.loaded = reading.guarded("loaded", lambda: _loaded(host)) or frozenset()
    return reading


def integer(text: str | None) -> int | None:
    """Read a whole number; None for other text, such as `N/A`."""
    try:
        return int((text or "").strip())
    except ValueError:
        return None


def parse_mounts(text: str) -> list[Mount]:
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 4:
            source, target, fstype = (_unescape(field) for field in fields[:3])
            mounts.append(Mount(source, target, fstype, tuple(fields[3].split(","))))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)


def parse_modules(text: str) -> list[str]:
    return [line.split(" ", 1)[0] for line in text.splitlines() if line.strip()]


def _loaded(host: Host) -> frozenset[str]:
    """Return the modules that are in effect. What is built into the kernel is in no table of modules, but has a folder in
    /sys/module if it has parameters or a version (Documentation/ABI/stable/sysfs-module)."""
    return frozenset([*parse_modules(host.read("/proc/modules") or ""), *host.names("/sys/module")])


_MODALIAS = re.compile(r"pci:v([0-9A-F]{8})d([0-9A-F]{8})sv[0-9A-F]{8}sd[0-9A-F]{8}bc([0-9A-F]{2})")


def parse_modalias(slot: str, text: str) -> Device | None:
    match = _MODALIAS.match(text)
    return Device(slot, int(match[1], 16), int(match[2], 16), int(match[3], 16)) if match else None


def _pci(host: Host) -> list[Device] | None:
    """Return the PCI devices; None where sysfs is hidden. Machines without a bus, e.g. small virtual ones, have none."""
    if not host.exists("/sys/bus"):
        return None
    slots = host.names("/sys/bus/pci/devices")
    devices = (parse_modalias(slot, host.read(f"/sys/bus/pci/devices/{slot}/modalias") or "") for slot in slots)
    return [device for device in devices if device is not None]


_PROGRAMS = re.compile(r"slurm|python|pt_main|torchrun|chronyd|ntpd|systemd-timesyn|trainer")
"""These processes' arguments are needed; the kernel cuts names to 15 characters. Reading all arguments of a large node takes
tens of milliseconds."""


def _processes(host: Host) -> list[Process]:
    # Half of a large node's processes are the kernel's own threads, children of process 2.
    kernel = set((host.read("/proc/2/task/2/children") or "").split())
    processes = []
    for pid in host.names("/proc"):
        if pid.isdigit() and pid not in kernel:
            stat = host.read(f"/proc/{pid}/stat") or ""
            name = stat[stat.find("(") + 1 : stat.rfind(")")]
            if _PROGRAMS.search(name):
                command = (host.read(f"/proc/{pid}/cmdline") or "").rstrip("\0").split("\0")
                processes.append(Process(int(pid), name, tuple(command), start_ticks(stat) or 0))
    return sorted(processes, key=lambda process: (process.started, process.pid))


def start_ticks(stat: str) -> int | None:
    """Return field 22 of /proc/PID/stat, clock ticks from boot to start; the name in field 2 may hold spaces and
    parentheses."""
    fields = stat[stat.rfind(")") + 1 :].split()
    return integer(fields[19]) if len(fields) > 19 else None


def run_side_by_side(reading: MachineReading, calls: Mapping[str, Callable[[], Any]], within: float) -> dict[str, Any]:
    """Run calls side by side and return their results by name; None and an error for each that failed or did not end in
    time."""
    results: dict[str, Any] = {}

    def run(name: str, call: Callable[[], Any]) -> None:
        results[name] = reading.guarded(name, call)

    threads = {name: threading.Thread(target=run, args=(name, call), daemon=True) for name, call in calls.items()}
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + within
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            reading.fault(name, f"did not end within {within:g} s")
    return {name: results.get(name) for name in calls}


def space(host: Host, path: str) -> os.statvfs_result | None:
    try:
        return os.statvfs(host.path(path))
    except OSError:
        return None
