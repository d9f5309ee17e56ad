"""The group of the cluster that a node belongs to."""

from __future__ import annotations

from node_setup.agent.model import Facts, Request


def group_of(facts: Facts, request: Request) -> str | None:
    """Return the group that the caller names, else the node's own record of it, else the only one of its instance type."""
    known = request.group or facts.get("group")
    if isinstance(known, str):
        return known
    kind = bare_type((facts.get("instance") or {}).get("type"))
    groups = request.document.get("groups") or {}
    same = [name for name, entry in groups.items() if kind and bare_type(entry.get("type")) == kind]
    return same[0] if len(same) == 1 else None


def bare_type(kind: object) -> str | None:
    """Return an instance type without HyperPod's prefix; None where it is not a name."""
    return (kind[3:] if kind.startswith("ml.") else kind) if isinstance(kind, str) and kind else None
