"""In which zones AWS offers the types with EFA or accelerators, from a snapshot of DescribeInstanceTypeOfferings.

`offerings.jsonl` is written by `infra.catalog.refresh`; its first line names source, date, and the zones that it
covers. What is offered only grows: a type that is missing in a zone may be there since. A zone or type that the snapshot
does not hold is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

OFFERINGS = Path(__file__).with_name("offerings.jsonl")


@dataclass(frozen=True)
class Offerings:
    """`covered`: zone ids that the snapshot has; `zones`: those that offer a type, by its name."""

    source: str
    date: str
    covered: frozenset[str]
    zones: Mapping[str, frozenset[str]]


@cache
def offerings() -> Offerings:
    """Return the snapshot in this package."""
    about, *lines = map(json.loads, OFFERINGS.read_text(encoding="utf-8").splitlines())
    zones = {name: frozenset(line["zones"]) for line in lines for name in line["types"]}
    return Offerings(about["source"], about["date"], frozenset(about["asked"]), MappingProxyType(zones))


def missing_in(name: str, zone_id: str) -> frozenset[str] | None:
    """Return the zones that offer a type which `zone_id` does not; None where it does, or the snapshot does not know."""
    snapshot = offerings()
    zones = snapshot.zones.get(name)
    return zones if zones and zone_id in snapshot.covered and zone_id not in zones else None
