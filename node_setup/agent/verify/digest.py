"""The facts that should be equal on all nodes of a group, small enough to compare hundreds of nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from node_setup.agent.model import Facts
from node_setup.agent.verify.result import fact_at

OWN_ARGUMENTS = frozenset({"root", "BOOT_IMAGE", "initrd", "ip", "hostname", "ostree"})
"""These options of the kernel's command line name this one machine's disks."""


def digest(facts: Facts) -> dict[str, Any]:
    """Return a flat digest in words that a table can show; None stands for what could not be read."""
    gpus, efa = _rows(facts, "gpu", "devices"), _rows(facts, "efa", "devices")
    blocks, mounts = _rows(facts, "blocks"), _rows(facts, "lustre", "mounts")
    arguments, memory = fact_at(facts, "kernel", "cmdline"), fact_at(facts, "memory", "gib")
    plugins, sysctls = fact_at(facts, "efa", "plugins"), fact_at(facts, "sysctl")
    values: dict[str, Any] = {
        "instance type": fact_at(facts, "instance", "type"),
        "os": " ".join(str(fact_at(facts, "os", name) or "?") for name in ("id", "version")),
        "kernel": fact_at(facts, "kernel", "release"),
        "kernel arguments": _arguments(arguments) if isinstance(arguments, Mapping) else None,
        "transparent huge pages": fact_at(facts, "kernel", "thp"),
        "cpus": fact_at(facts, "cpu", "count"),
        "memory": f"{round(memory)} GiB" if isinstance(memory, (int, float)) else None,
        "huge pages": fact_at(facts, "memory", "hugepages_total"),
        "gpu": _same(gpus, "name"),
        "gpus": None if gpus is None else len(gpus),
        "gpu driver": fact_at(facts, "gpu", "driver"),
        "fabric manager": fact_at(facts, "gpu", "fabric_manager", "version"),
        "gpu clocks": _same(gpus, "applications"),
        "efa devices": None if efa is None else len(efa),
        "efa installer": fact_at(facts, "efa", "installer"),
        "libfabric": fact_at(facts, "efa", "libfabric"),
        "ofi plugins": _joined(plugins) if isinstance(plugins, list) else None,
        "gaudi driver": fact_at(facts, "hpu", "driver"),
        "lustre client": fact_at(facts, "lustre", "client"),
        "lustre mount": None if mounts is None else _joined(_mount_names(mounts)),
        "local drives": None if blocks is None else sum(bool(block.get("instance_store")) for block in blocks),
        "time source": fact_at(facts, "time", "source"),
    }
    values.update(
        {f"sysctl {key}": value for key, value in sorted(sysctls.items())} if isinstance(sysctls, Mapping) else {}
    )
    return values


def _rows(facts: Facts, *path: str) -> list[Mapping[str, Any]] | None:
    rows = fact_at(facts, *path)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else None


def _arguments(arguments: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(arguments.items()) if name not in OWN_ARGUMENTS)


def _same(devices: Any, key: str) -> str | None:
    """Return what all devices of the node have in common, or all that they have."""
    return None if devices is None else _joined(sorted({_text(device.get(key)) for device in devices}))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(str(part) for part in value.values())
    return str(value)


def _joined(values: Any) -> str | None:
    return None if values is None else ", ".join(map(str, values))


def _mount_names(mounts: Any) -> list[str]:
    """Return sources and mount points without the server's address, which may differ from node to node."""
    return [f"{re.sub('^.*:/', '', str(mount.get('source')))} at {mount.get('target')}" for mount in mounts]
