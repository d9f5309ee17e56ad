"""The odd one out: nodes whose facts differ from most of their group's, and nodes that are slower than the others."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

FEWEST = 4
"""Values below which a median says nothing of who is off."""
CUT = 3.5
"""Of the modified z-score (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993)."""
LEAST_SHARE = 0.03
"""Of the median: values that lie so close together that their own spread is noise are not told apart."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal values by the median of their absolute deviations (the same source)."""


@dataclass(frozen=True)
class Odd:
    """One fact of one group. `majority` is what more than half of the nodes have, as text; None where there is no such value
    and `hosts` therefore holds all of them. A node that does not know the fact has None."""

    group: str
    key: str
    majority: str | None
    hosts: Mapping[str, str | None]

    @property
    def why(self) -> str:
        told = ", ".join(f"{host}: {_shown(value)}" for host, value in self.hosts.items())
        return f"{self.key}: {told}; {f'most have {self.majority}' if self.majority is not None else 'no majority'}"


def odd_ones(digests: Mapping[str, Mapping[str, Any]], groups: Mapping[str, str]) -> list[Odd]:
    """Facts that are not the same on all nodes of a group (by host; hosts without one are compared with each other).

    A fact that no node of a group knows is no difference, nor is anything of a group with one node.
    """
    members: dict[str, list[str]] = {}
    for host in digests:
        members.setdefault(groups.get(host, ""), []).append(host)
    found = []
    for group, hosts in sorted(members.items()):
        keys = dict.fromkeys(key for host in hosts for key in digests[host])
        for key in keys:
            values = {host: _text(digests[host].get(key)) for host in hosts}
            odd = _odd(group, key, values)
            if odd:
                found.append(odd)
    return found


def _odd(group: str, key: str, values: Mapping[str, str | None]) -> Odd | None:
    if len(set(values.values())) <= 1:
        return None
    value, count = Counter(values.values()).most_common(1)[0]
    if value is None or 2 * count <= len(values):
        return Odd(group, key, None, dict(values))
    return Odd(group, key, value, {host: own for host, own in values.items() if own != value})


def _text(value: Any) -> str | None:
    """Values by what they are, not by how they are spelled: lists and tables compare by content."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


def _shown(value: str | None) -> str:
    return "unknown" if value is None else value or "none"


@dataclass(frozen=True)
class Slow:
    """`slow` maps hosts to how many robust standard deviations they lie below the median; `why` says why nothing was judged."""

    median: float | None
    slow: Mapping[str, float]
    unmeasured: tuple[str, ...] = ()
    why: str = ""


def slow_ones(values: Mapping[str, float | None]) -> Slow:
    """Hosts far below the median of all, which a few bad ones do not move; higher is better. Values that are no finite number
    are not measured."""
    measured = {host: value for host, value in values.items() if value is not None and math.isfinite(value)}
    unmeasured = tuple(host for host in values if host not in measured)
    if not measured:
        return Slow(None, {}, unmeasured, "nothing was measured")
    middle = median(measured.values())
    if len(measured) < FEWEST:
        return Slow(middle, {}, unmeasured, f"{len(measured)} values are too few to tell who is off; {FEWEST} at least")
    gaps = {host: middle - value for host, value in measured.items()}
    # The floor also stands in for the spread where more than half of the values are the same and it is zero.
    spread = max(_MAD_TO_SIGMA * median(map(abs, gaps.values())), LEAST_SHARE * abs(middle) / CUT)
    slow = {host: gap / spread for host, gap in gaps.items() if gap > CUT * spread}
    return Slow(middle, slow, unmeasured)
