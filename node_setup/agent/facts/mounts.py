"""Mounted file systems, read last: reading the state of Lustre may mount it."""

from __future__ import annotations

from typing import Any

from node_setup.agent.facts.reading import MachineReading, parse_mounts

EMPTY: dict[str, Any] = {"mounts": None}


def collect(reading: MachineReading) -> dict[str, Any]:
    text = reading.host.read("/proc/mounts")
    if text is None:
        reading.fault("mounts", "/proc/mounts cannot be read")
        return EMPTY
    return {"mounts": [{**mount._asdict(), "options": list(mount.options)} for mount in parse_mounts(text)]}
