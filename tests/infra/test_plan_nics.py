"""Every EFA instance type gets a layout that EC2 accepts and that uses all the EFA it has."""

from __future__ import annotations

from collections import Counter

import pytest

from infra.catalog.instances import Instance, instance, snapshot
from infra.plan.nodes.nics import Nic, Policy, addresses, nics

WITH_EFA = [found for found in snapshot().types.values() if found.efa]
POLICIES: list[Policy] = ["addresses", "bandwidth"]


def layout_of(name: str, policy: Policy = "addresses") -> tuple[Nic, ...]:
    found = instance(name)
    assert found is not None
    return nics(found, policy)


def test_the_snapshot_holds_the_efa_types() -> None:
    assert len(WITH_EFA) > 300


def breaches(found: Instance, policy: Policy) -> list[str]:
    """What EC2 would refuse in the layout of a type, or what of its EFA the layout leaves out."""
    layout = nics(found, policy)
    cards = {card.index: card for card in found.cards}
    on_card = Counter(nic.card for nic in layout)
    sound = {
        "the primary comes first": (layout[0].card, layout[0].device) == (found.primary_card, 0),
        "the primary has an address": layout[0].kind != "efa-only",
        "no slot is taken twice": len({(nic.card, nic.device) for nic in layout}) == len(layout),
        "all its EFA is used": sum(nic.kind != "interface" for nic in layout) == found.efa,
        "each card takes its kinds": all(nic.kind in cards[nic.card].kinds for nic in layout),
        "no device is beyond the card's slots": all(nic.device < cards[nic.card].slots for nic in layout),
        "no card has more interfaces than slots": all(count <= cards[card].slots for card, count in on_card.items()),
    }
    return [f"{found.name}: {rule}" for rule, holds in sound.items() if not holds]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_layout_of_every_efa_type_is_one_that_ec2_accepts(policy: Policy) -> None:
    assert [breach for found in WITH_EFA for breach in breaches(found, policy)] == []


@pytest.mark.parametrize(
    ("name", "interfaces", "one_address", "bandwidth"),
    [
        ("p4d.24xlarge", 5, 1, 1),
        ("p5.4xlarge", 2, 1, 1),
        ("p5.48xlarge", 33, 1, 8),
        ("p5en.48xlarge", 17, 1, 4),
        ("p6-b200.48xlarge", 9, 1, 2),
        ("p6-b300.48xlarge", 17, 1, 5),
        ("trn1n.32xlarge", 17, 1, 4),
        ("g6e.12xlarge", 2, 1, 1),
        ("g6e.48xlarge", 5, 1, 1),
        ("hpc6id.32xlarge", 2, 1, 1),
        ("c5n.18xlarge", 2, 1, 1),
    ],
)
def test_interfaces_and_addresses_of_well_known_types(
    name: str, interfaces: int, one_address: int, bandwidth: int
) -> None:
    assert len(layout_of(name)) == interfaces
    assert addresses(layout_of(name)) == one_address
    assert addresses(layout_of(name, "bandwidth")) == bandwidth


def test_a_primary_card_without_efa_gets_a_plain_interface_only() -> None:
    assert [nic for nic in layout_of("p6-b300.48xlarge") if nic.card == 0] == [Nic(0, 0, "interface")]


def test_primary_card_with_one_slot_carries_addresses_and_efa() -> None:
    assert layout_of("hpc6id.32xlarge") == (Nic(0, 0, "efa"), Nic(1, 0, "efa-only"))


def test_a_type_without_efa_gets_its_primary_interface() -> None:
    assert layout_of("m5.large") == (Nic(0, 0, "interface"),)
