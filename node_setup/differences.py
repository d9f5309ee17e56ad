"""Facts in which a node differs from most nodes of its group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """This is one fact of one group. `majority` is what more than half of the nodes have, as text; None where there is no such
    value and `hosts` therefore holds all of them. A node that does not know the fact has None."""

    group: str
    key: str
    majority: str | None
    hosts: Mapping[str, str | None]

    @property
    def why(self) -> str:
        values = ", ".join(f"{host}: {_shown(value)}" for host, value in self.hosts.items())
        return f"{self.key}: {values}; {f'most have {self.majority}' if self.majority is not None else 'no majority'}"


def find_differences(digests: Mapping[str, Mapping[str, Any]], groups: Mapping[str, str]) -> list[Difference]:
    """Return the facts that are not the same on all nodes of a group (by host; hosts without one are compared with each other).

    A fact that no node of a group has is not a difference, nor is any fact of a group with one node.
    """
    members: dict[str, list[str]] = {}
    for host in digests:
        members.setdefault(groups.get(host, ""), []).append(host)
    differences = []
    for group, hosts in sorted(members.items()):
        keys = dict.fromkeys(key for host in hosts for key in digests[host])
        for key in keys:
            values = {host: _text(digests[host].get(key)) for host in hosts}
            odd = _difference(group, key, values)
            if odd:
                differences.append(odd)
    return differences


def _difference(group: str, key: str, values: Mapping[str, str | None]) -> Difference | None:
    if len(set(values.values())) <= 1:
        return None
    value, count = Counter(values.values()).most_common(1)[0]
    if value is None or 2 * count <= len(values):
        return Difference(group, key, None, dict(values))
    return Difference(group, key, value, {host: own for host, own in values.items() if own != value})


def _text(value: Any) -> str | None:
    """Write values by what they are, not by how they are spelled: lists and tables compare by content."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


def _shown(value: str | None) -> str:
    return "unknown" if value is None else value or "none"
