"""Intel Gaudi accelerators, from `hl-smi`."""

from __future__ import annotations

import re
from typing import Any

from node_setup.agent.facts.devices.gpu import parse_rows
from node_setup.agent.facts.reading import MachineReading, integer

EMPTY: dict[str, Any] = {"hpu": {"present": None, "driver": None, "devices": None}}
HABANA = 0x1DA3
FIELDS = ("index", "module_id", "bus_id", "name", "driver_version", "memory.total", "memory.used", "temperature.aip")
"""These are names of `hl-smi -Q` (docs.habana.ai, System Management Interface Tool)."""


def collect(reading: MachineReading) -> dict[str, Any]:
    present = any(re.fullmatch(r"hl\d+", name) for name in reading.host.names("/dev")) or reading.has(HABANA)
    if not present or reading.host.which("hl-smi") is None:
        if present:
            reading.fault("hpu", "there is a Gaudi device but no hl-smi: its software is not installed")
        return {"hpu": {**EMPTY["hpu"], "present": present}}
    text = reading.output_of("hpu.devices", ["hl-smi", "-Q", ",".join(FIELDS), "-f", "csv,noheader"], 30.0)
    rows = None if text is None else parse_rows(FIELDS, text)
    driver = reading.text("/sys/module/habanalabs/version") or (rows[0]["driver_version"] if rows else None)
    return {"hpu": {"present": True, "driver": driver, "devices": rows and [device_of(row) for row in rows]}}


def device_of(row: dict[str, str | None]) -> dict[str, Any]:
    """Return one accelerator's facts: memory in MiB, temperature in degrees Celsius. hl-smi writes units after its numbers."""
    return {
        "index": integer(row["index"]),
        "module": integer(row["module_id"]),
        "pci": row["bus_id"],
        "name": row["name"],
        "memory_mib": _leading(row["memory.total"]),
        "used_mib": _leading(row["memory.used"]),
        "celsius": _leading(row["temperature.aip"]),
    }


def _leading(text: str | None) -> int | None:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None
