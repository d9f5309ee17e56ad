"""The hardware that a node should have: by its instance type and by its group in the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from node_setup.agent.group import bare, group_of
from node_setup.agent.model import Facts, Request
from node_setup.agent.settings import data
from node_setup.agent.verify.result import known

BY_HAND = "machines"
"""The backend whose node document someone wrote who knows the machines: its counts are believed for any type."""


@dataclass(frozen=True)
class Expected:
    """Counts of devices, None where they are not known; `problem` says why that is so. `efa` may be less than the type has,
    where the cluster attaches fewer; `nvlinks` counts links of one GPU, None where not known. `other` holds where the node is
    another type than its group."""

    type: str | None = None
    group: str | None = None
    gpus: int | None = None
    efa: int | None = None
    nvme: int | None = None
    nvlinks: int | None = None
    gpu: str = ""
    neuron: int = 0
    problem: str = ""
    other: bool = False
    role: str = "worker"


def expected(facts: Facts, request: Request) -> Expected:
    """By the table of types, or by the group where someone counted by hand; a cluster may attach fewer EFA devices than its
    type has."""
    group = group_of(facts, request)
    described = (request.document.get("groups") or {}).get(group) or {}
    kind = bare(known(facts, "instance", "type"))
    wanted = bare(described.get("type"))
    role = str(described.get("role") or "worker")
    table = type_table(kind or wanted)
    machines = request.document.get("backend") == BY_HAND and bool(described)
    by_hand = machines or bool(described.get("by_hand"))
    counts = _counts(None if described.get("by_hand") else table, described, by_hand)
    others = [bare(other) for other in described.get("other_types") or ()]
    differs = bool(kind and wanted and kind not in (wanted, *others) and not machines)
    return Expected(
        type=kind or wanted,
        group=group,
        gpus=counts["gpus"],
        efa=counts["efa"],
        nvme=counts["nvme"],
        nvlinks=_nvlinks(kind or wanted),
        gpu=str(table.get("gpu", "")) if table else "",
        neuron=int(table.get("neuron", 0)) if table else 0,
        problem=_problem(kind, wanted, differs, by_hand or table is not None),
        other=differs,
        role=role,
    )


def type_table(kind: str | None) -> Mapping[str, Any] | None:
    """Return the type's row in `settings/instances.toml`; None where it is not in it."""
    tables = data.tables().get("instances", {})
    found = tables.get("instance", {}).get(kind)
    if found:
        return {"gpus": 0, **found}
    drives = next((drives for drives, names in tables.get("plain", {}).items() if kind in names), None)
    return None if drives is None else {"gpus": 0, "efa": 0, "nvme": int(drives)}


def _counts(table: Mapping[str, Any] | None, described: Mapping[str, Any], by_hand: bool) -> dict[str, int | None]:
    if table is None:
        return {name: described.get(name) if by_hand else None for name in ("gpus", "efa", "nvme")}
    attached = min(described.get("efa", table["efa"]), table["efa"])
    return {"gpus": table["gpus"], "efa": attached, "nvme": table["nvme"]}


def _problem(kind: str | None, wanted: str | None, differs: bool, counted: bool) -> str:
    if differs:
        return f"the node is a {kind}, its group has {wanted}"
    if counted:
        return ""
    if kind or wanted:
        return f"{kind or wanted} is not in the table of instance types, so what it should have is not known"
    return "neither the node nor its cluster names its instance type"


def _nvlinks(kind: str | None) -> int | None:
    for table in data.tables().get("hardware", {}).get("nvlink", ()):
        if kind in table["types"]:
            return int(table["links"])
    return None
