"""What an instance type is made of, from a snapshot of DescribeInstanceTypes.

`instances.jsonl` holds one type a line, written by `infra.catalog.refresh`; its first line names source and date.
A type that is listed here may still be absent from a region or a zone: only AWS knows that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

SNAPSHOT = Path(__file__).with_name("instances.jsonl")
NITRO_V3 = (
    *("c5n.", "dl1.", "dl2q.", "g4dn.", "g5.", "i3en.", "inf1.", "m5dn.", "m5n.", "m5zn."),
    *("p3dn.", "p4d.", "p4de.", "r5dn.", "r5n.", "vt1.", "x2iezn."),
)
"""Families with EFA on Nitro v3, as the table of supported instance types had them in August 2026; none has EFA on an older one
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-instance-types)."""


@dataclass(frozen=True)
class Card:
    """A network card: its index, how many interfaces it takes, and of which types (`interface`, `efa`, `efa-only`)."""

    index: int
    slots: int
    kinds: frozenset[str]


@dataclass(frozen=True)
class Accelerator:
    """`count` devices of one kind (`gpu`, `neuron`) with `memory_mib` each; 0 where AWS does not say."""

    kind: str
    name: str
    count: int
    memory_mib: int


@dataclass(frozen=True)
class Instance:
    """One instance type; `usage` holds the ways to pay for it (`on-demand`, `spot`, `capacity-block`).

    `network_gbit` is what all cards carry together without end, in Gbit/s; 0 where AWS does not say.
    """

    name: str
    architecture: str
    vcpus: int
    threads_per_core: int
    memory_mib: int
    accelerators: tuple[Accelerator, ...]
    nvme_count: int
    nvme_gb: int
    usage: frozenset[str]
    placement: frozenset[str]
    efa: int
    primary_card: int
    cards: tuple[Card, ...]
    network_gbit: float = 0.0

    @property
    def accelerator_count(self) -> int:
        """Accelerators of all kinds."""
        return sum(accelerator.count for accelerator in self.accelerators)


@dataclass(frozen=True)
class Snapshot:
    """Where the facts come from, and the facts by type name."""

    source: str
    date: str
    types: Mapping[str, Instance]


@cache
def snapshot() -> Snapshot:
    """Return the snapshot in this package."""
    head, *lines = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    about = json.loads(head)
    types = {found.name: found for found in map(_instance, map(json.loads, lines))}
    return Snapshot(about["source"], about["date"], MappingProxyType(types))


def instance(name: str) -> Instance | None:
    """Return the type of this name (also with HyperPod's prefix `ml.`), None when the snapshot does not know it."""
    return snapshot().types.get(name.removeprefix("ml."))


def _instance(line: dict[str, Any]) -> Instance:
    cards: list[Card] = []
    for repeated, slots, kinds in line["cards"]:
        cards += [Card(index, slots, frozenset(kinds)) for index in range(len(cards), len(cards) + repeated)]
    nvme_count, nvme_gb = line["nvme"]
    return Instance(
        name=line["type"],
        architecture=line["arch"],
        vcpus=line["vcpus"],
        threads_per_core=line["threads"],
        memory_mib=line["mib"],
        accelerators=tuple(Accelerator(*accelerator) for accelerator in line["accelerators"]),
        nvme_count=nvme_count,
        nvme_gb=nvme_gb,
        usage=frozenset(line["usage"]),
        placement=frozenset(line["placement"]),
        efa=line["efa"],
        primary_card=line["primary"],
        cards=tuple(cards),
        network_gbit=line["gbit"],
    )
