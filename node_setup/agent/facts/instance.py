"""The instance and its group in the cluster: from metadata, firmware, HyperPod and the agent's own files."""

from __future__ import annotations

import json
import re
from typing import Any

from node_setup.agent import owned
from node_setup.agent.facts import metadata
from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"instance": dict.fromkeys(("type", "id", "life_cycle", "zone_id", "source")), "group": None}
HYPERPOD = "/opt/ml/config/resource_config.json"
"""HyperPod writes it to every node (SageMaker developer guide, lifecycle scripts)."""
NODE = "/etc/lustrain/node.json"
"""Our first boot writes it on EC2."""


def collect(reading: MachineReading, imds: dict[str, str | None]) -> dict[str, Any]:
    hyperpod = parse_hyperpod(_json(reading, HYPERPOD), imds.get("id"), _addresses(reading))
    node, tuning = _json(reading, NODE), _json(reading, owned.TUNING)
    types = {
        "imds": imds.get("type"),
        "dmi": _by_firmware(reading),
        "hyperpod": hyperpod.get("type"),
        "node.json": node.get("instance_type"),
    }
    source = next((name for name, value in types.items() if value), None)
    instance = {
        "type": types[source] if source else None,
        "id": imds.get("id") or hyperpod.get("id") or _by_asset(reading),
        "life_cycle": imds.get("life_cycle"),
        "zone_id": imds.get("zone_id") or node.get("zone_id"),
        "source": source,
    }
    return {"instance": instance, "group": hyperpod.get("group") or node.get("group") or tuning.get("group")}


def _json(reading: MachineReading, path: str) -> dict[str, Any]:
    text = reading.host.read(path)
    if text is None:
        return {}
    try:
        table = json.loads(text)
    except ValueError as error:
        reading.fault("instance", f"{path}: {error}")
        return {}
    return table if isinstance(table, dict) else {}


def _by_firmware(reading: MachineReading) -> str | None:
    """Return the instance type from the product's name, which Nitro instances have; older ones say `HVM domU`."""
    name = reading.text("/sys/devices/virtual/dmi/id/product_name") or ""
    return name if metadata.is_ec2(reading) and re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", name) else None


def _by_asset(reading: MachineReading) -> str | None:
    tag = reading.text("/sys/devices/virtual/dmi/id/board_asset_tag") or ""
    return tag if re.fullmatch(r"i-[0-9a-f]{8,17}", tag) else None


def _addresses(reading: MachineReading) -> set[str]:
    return parse_addresses(reading.host.read("/proc/net/fib_trie") or "")


def parse_addresses(text: str) -> set[str]:
    """Return this machine's own IPv4 addresses, in the kernel's routing trie the ones marked `host LOCAL`."""
    return set(re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", text))


def parse_hyperpod(config: dict[str, Any], instance_id: str | None, addresses: set[str]) -> dict[str, str]:
    """Return {group, type, id} of the one of HyperPod's instances that has this instance's id or one of its addresses."""
    for group in config.get("InstanceGroups") or ():
        for member in (group.get("Instances") or ()) if isinstance(group, dict) else ():
            same = instance_id is not None and member.get("InstanceId") == instance_id
            if same or member.get("CustomerIpAddress") in addresses:
                kind = str(group.get("InstanceType", "")).partition("ml.")
                return {"group": group.get("Name"), "type": kind[2] or kind[0], "id": member.get("InstanceId")}
    return {}
