"""NVIDIA GPUs, from `nvidia-smi` and the kernel's log."""

from __future__ import annotations

import re
from typing import Any, Callable

from node_setup.agent.facts.reading import MachineReading, integer, run_side_by_side

EMPTY: dict[str, Any] = {"gpu": dict.fromkeys(("present", "driver", "devices", "fabric_manager", "nvlinks", "xids"))}
NVIDIA = 0x10DE
DISPLAY, ACCELERATOR = 0x03, 0x12
"""These are PCI base classes: display controllers, to which data-center GPUs belong as 3D controllers, and processing
accelerators."""

FIELDS = (
    *("index", "name", "uuid", "pci.bus_id", "driver_version", "memory.total", "persistence_mode"),
    *("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure"),
    *("clocks.current.graphics", "clocks.current.memory", "clocks.max.graphics", "clocks.max.memory"),
    *("clocks.applications.graphics", "clocks.applications.memory", "clocks_throttle_reasons.active"),
    *("fabric.state", "fabric.status"),
)
"""These are names of `nvidia-smi --help-query-gpu`; one that a driver does not know is read by its newer name, or not at
all."""
RENAMED = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}
"""These are newer names by older ones, which current drivers still take (NVIDIA's nvidia-smi manual, "Clocks Event
Reasons")."""

THROTTLES = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
"""These are the bits of nvmlClocksEventReasons, from nvml.h."""
_SECONDS = 30.0
"""A driver that no process holds open initialises all GPUs first, which takes several seconds on eight."""


def collect(reading: MachineReading) -> dict[str, Any]:
    present = _present(reading)
    if not present:
        return {"gpu": {**EMPTY["gpu"], "present": present}, "jobs": []}
    if reading.host.which("nvidia-smi") is None:
        reading.fault("gpu", "there is an NVIDIA device but no nvidia-smi: the driver is not installed")
        return {"gpu": {**EMPTY["gpu"], "present": True}, "jobs": None if _driven(reading) else []}
    calls: dict[str, Callable[[], Any]] = {
        "gpu.devices": lambda: _query(reading),
        "gpu.nvlinks": lambda: _nvlinks(reading),
        "gpu.processes": lambda: _processes(reading),
        "gpu.xids": lambda: _xids(reading),
        "gpu.fabric_manager": lambda: _fabric_manager(reading),
    }
    rows, nvlinks, processes, xids, manager = run_side_by_side(reading, calls, within=2 * _SECONDS).values()
    devices = None if rows is None else [device_of(row) for row in rows]
    gpu = {
        "present": True,
        "driver": rows[0].get("driver_version") if rows else None,
        "devices": devices,
        "fabric_manager": {"version": manager},
        "nvlinks": nvlinks,
        "xids": xids,
    }
    return {"gpu": gpu, "jobs": None if processes is None else [{"kind": "gpu", "id": pid} for pid in processes]}


def _present(reading: MachineReading) -> bool | None:
    """Check the bus for a GPU; where the bus is hidden, as in some containers, check what the driver shows."""
    return True if _driven(reading) else reading.has(NVIDIA, DISPLAY, ACCELERATOR)


def _driven(reading: MachineReading) -> bool:
    """Check that a driver is loaded, without which no program uses a GPU."""
    shown = any(re.fullmatch(r"nvidia\d+", name) for name in reading.host.names("/dev"))
    return shown or reading.host.exists("/proc/driver/nvidia/version")


def _query(reading: MachineReading) -> list[dict[str, str | None]] | None:
    fields: tuple[str, ...] = FIELDS
    while fields:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        done = reading.host.run(command, _SECONDS)
        if done.ok:
            return parse_rows(fields, done.out)
        unknown = re.search(r'Field "([^"]+)" is not a valid field', done.out + done.err)
        left = _without(fields, unknown[1]) if unknown else fields
        if left == fields:
            reading.fault("gpu.devices", f"nvidia-smi: {done.complaint}")
            return None
        fields = left
    return None


def _without(fields: tuple[str, ...], unknown: str) -> tuple[str, ...]:
    """Return the fields that are left to query; a renamed field keeps its place."""
    newer = tuple(RENAMED.get(name, name) if name == unknown else name for name in fields)
    return newer if newer != fields else tuple(name for name in fields if name != unknown)


def parse_rows(fields: tuple[str, ...], text: str) -> list[dict[str, str | None]]:
    """Parse lines of values by field, with `N/A` and the like as None; a line with a different number of values is not a
    GPU's."""
    rows = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields) and (fields[0] != "index" or values[0].isdigit()):
            rows.append({name: parse_value(value) for name, value in zip(fields, values)})
    return rows


def parse_value(value: str) -> str | None:
    """Return the value; None for what nvidia-smi prints of a field that the GPU does not have: `N/A`, `[N/A]`, `[Not
    Supported]`, …"""
    return (
        None
        if re.fullmatch(r"\[?(N/A|Not Supported|Unknown Error|GPU requires reset|Insufficient Permissions?)\]?|", value)
        else value
    )


def device_of(row: dict[str, str | None]) -> dict[str, Any]:
    """Return one GPU's facts: clocks in MHz, memory in MiB, `pci` as the kernel writes it: 0000:53:00.0."""
    active = next((row[name] for pair in RENAMED.items() for name in pair if name in row), None)
    return {
        "index": integer(row.get("index")),
        "name": row.get("name"),
        "uuid": row.get("uuid"),
        "pci": _slot(row.get("pci.bus_id")),
        "persistence": _yes(row.get("persistence_mode")),
        "ecc_volatile_uncorrected": integer(row.get("ecc.errors.uncorrected.volatile.total")),
        "remap_pending": _yes(row.get("remapped_rows.pending")),
        "remap_failed": _yes(row.get("remapped_rows.failure")),
        "clocks": _clocks(row, "current"),
        "applications": _clocks(row, "applications"),
        "max": _clocks(row, "max"),
        "throttle": None if active is None else throttles(active),
        "memory_mib": integer(row.get("memory.total")),
        "fabric_state": row.get("fabric.state"),
        "fabric_status": row.get("fabric.status"),
    }


def _clocks(row: dict[str, str | None], kind: str) -> dict[str, int | None]:
    return {name: integer(row.get(f"clocks.{kind}.{name}")) for name in ("graphics", "memory")}


def _yes(value: str | None) -> bool | None:
    """Read `Enabled`, `Yes`, or for remapped rows a count as some drivers print it."""
    if value is None:
        return None
    return {"enabled": True, "yes": True, "disabled": False, "no": False, "0": False, "1": True}.get(value.lower())


def _slot(value: str | None) -> str | None:
    return value[-12:].lower() if value else None


def throttles(active: str) -> list[str] | None:
    """Return the names of the bits that are set; None where the text is not a mask."""
    try:
        mask = int(active, 16)
    except ValueError:
        return None
    return [name for bit, name in THROTTLES if mask & bit]


def _processes(reading: MachineReading) -> list[str] | None:
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader,nounits"]
    text = reading.output_of("gpu.processes", command, _SECONDS)
    return (
        None
        if text is None
        else sorted({line.strip() for line in text.splitlines() if line.strip().isdigit()}, key=int)
    )


def _nvlinks(reading: MachineReading) -> dict[str, dict[str, int]] | None:
    """Return the links that are up and their errors since the driver was loaded; empty where the GPUs have no NVLink."""
    state = reading.host.run(["nvidia-smi", "nvlink", "-s"], _SECONDS)
    if not state.ok:
        reading.fault("gpu.nvlinks", f"nvidia-smi nvlink -s: {state.complaint}")
        return None
    errors = reading.host.run(["nvidia-smi", "nvlink", "-e"], _SECONDS)
    counted = parse_nvlink_errors(errors.out) if errors.ok else {}
    return {gpu: {"up": up, "errors": counted.get(gpu, 0)} for gpu, up in parse_nvlinks(state.out).items()}


def parse_nvlinks(text: str) -> dict[str, int]:
    """Parse `nvidia-smi nvlink -s`: links with a speed, by the GPU's index; an `<inactive>` one is down."""
    return {gpu: sum("GB/s" in line for line in lines) for gpu, lines in _by_gpu(text).items() if lines}


def parse_nvlink_errors(text: str) -> dict[str, int]:
    """Parse `nvidia-smi nvlink -e`: the sum of a GPU's replay, recovery and CRC errors."""
    counts = {gpu: [re.search(r"Errors?:\s*(\d+)", line) for line in lines] for gpu, lines in _by_gpu(text).items()}
    return {gpu: sum(int(match[1]) for match in matches if match) for gpu, matches in counts.items()}


def _by_gpu(text: str) -> dict[str, list[str]]:
    by_gpu: dict[str, list[str]] = {}
    gpu = None
    for line in text.splitlines():
        head = re.match(r"GPU (\d+):", line)
        if head:
            gpu = head[1]
            by_gpu[gpu] = []
        elif gpu is not None and re.match(r"\s+Link \d+:", line):
            by_gpu[gpu].append(line)
    return by_gpu


def _fabric_manager(reading: MachineReading) -> str | None:
    if reading.host.which("nv-fabricmanager") is None:
        return None
    text = reading.output_of("gpu.fabric_manager", ["nv-fabricmanager", "--version"])
    match = re.search(r"\d+\.\d+(?:\.\d+)?", text or "")
    return match[0] if match else None


def _xids(reading: MachineReading) -> list[dict[str, Any]] | None:
    """Read the Xids of this boot from the journal, which keeps all, or from the kernel's own buffer, which forgets."""
    pattern = "Xid|NVIDIA GPU|fallen off the bus"
    command = ["journalctl", "-k", "-b", "0", "-q", "-o", "cat", "--no-pager", "-g", pattern]
    done = reading.host.run(command, _SECONDS) if reading.host.which("journalctl") else None
    # journalctl ends with 1 and says nothing where no line matches.
    if done is not None and (done.ok or not done.err.strip()) and reading.host.exists("/run/systemd/system"):
        return parse_xids(done.out)
    text = reading.output_of("gpu.xids", ["dmesg"])
    return None if text is None else parse_xids(text)


_XID = r"(?:NVRM: Xid|SXid) \(PCI:([0-9A-Fa-f:.]+)\): (\d+),? ?(.*)"
_LOST = r"The NVIDIA GPU ([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})"


def parse_xids(text: str) -> list[dict[str, Any]]:
    """Parse the errors that the driver reported, in order; `switch` is true where a switch and not a GPU had it (SXid).

    Some drivers report a GPU that fell off the bus without a number; that is what Xid 79 means (NVIDIA, Xid errors).
    """
    events: list[dict[str, Any]] = []
    lost = ""
    for line in text.splitlines():
        match, gone = re.search(_XID, line), re.search(_LOST, line)
        if match:
            switch = "SXid" in line
            events.append({"xid": int(match[2]), "pci": match[1], "text": match[3].strip(), "switch": switch})
        elif gone:
            lost = gone[1]
        elif lost and "fallen off the bus and is not responding" in line:
            events.append({"xid": 79, "pci": lost, "text": "GPU has fallen off the bus", "switch": False})
            lost = ""
    return events
