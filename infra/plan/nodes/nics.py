"""The network interfaces of an EFA instance, card by card.

The primary interface is a plain one, it alone has an IP address; EFA traffic goes over `efa-only` interfaces, which
take none (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html). The layout follows the interface
types that each card allows, never the number of cards: card 0 of p6-b300 takes no EFA at all, and hpc6id has one slot a
card, so that its primary must be both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.catalog.instances import Card, Instance

Kind = Literal["interface", "efa", "efa-only"]
Policy = Literal["addresses", "bandwidth"]

BANDWIDTH_EVERY = 4
"""`bandwidth` puts a plain interface on every 4th card, as AWS advises for TCP beside EFA on p5 (same page)."""


@dataclass(frozen=True)
class Nic:
    """One interface of a launch template: network card, device index on it, and interface type."""

    card: int
    device: int
    kind: Kind

    @property
    def has_address(self) -> bool:
        return self.kind != "efa-only"


def nics(instance: Instance, policy: Policy = "addresses") -> tuple[Nic, ...]:
    """Return the layout with all the EFA interfaces that the type has, the primary first.

    `addresses` spends one IP address a node; `bandwidth` adds plain interfaces for more TCP throughput outside EFA.
    """
    left = instance.efa
    nics: list[Nic] = []
    for card in sorted(instance.cards, key=lambda card: card.index != instance.primary_card):
        primary = card.index == instance.primary_card
        here = _primary(card, left) if primary else _secondary(card, left, policy)
        left -= sum(nic.kind != "interface" for nic in here)
        nics += here
    return tuple(nics)


def addresses(layout: tuple[Nic, ...]) -> int:
    """IP addresses of the subnet that one node with this layout takes."""
    return sum(nic.has_address for nic in layout)


def _primary(card: Card, left: int) -> list[Nic]:
    if left and "efa-only" in card.kinds and card.slots > 1:
        return [Nic(card.index, 0, "interface"), Nic(card.index, 1, "efa-only")]
    if left and "efa" in card.kinds:
        return [Nic(card.index, 0, "efa")]
    return [Nic(card.index, 0, "interface")]


def _secondary(card: Card, left: int, policy: Policy) -> list[Nic]:
    if not left:
        return []
    if "efa-only" not in card.kinds:
        return [Nic(card.index, 0, "efa")] if "efa" in card.kinds else []
    here = [Nic(card.index, 0, "efa-only")]
    if policy == "bandwidth" and card.slots > 1 and card.index % BANDWIDTH_EVERY == 0:
        here.append(Nic(card.index, 1, "interface"))
    return here
