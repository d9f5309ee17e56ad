"""Whether all types of a group are alike in what is the same for all its nodes: the launch template, the first boot, and the
counts that other tools read from the Cluster. The number of drives may differ among types of the catalogue, whose own numbers
the node agent has; where types are described by hand it goes by the group's one number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infra.catalog.instances import NITRO_V3, Instance
from infra.config import ClusterSpec, Group
from infra.finding import finding
from infra.plan.nodes.auto_scaling import CANONICAL, cpu, image
from infra.plan.nodes.capacity import market
from infra.plan.nodes.clients import by_default as lustre_efa
from infra.plan.nodes.nics import nics
from infra.plan.storage.lustre import efa_wanted
from lustrain.problem import Problem

DEVICES = {"gpu": "GPUs", "neuron": "Neuron devices"}


@dataclass(frozen=True)
class Trait:
    """Something that all nodes of a group share: its value, the value in words, and what to do where two types differ."""

    value: object
    words: str
    fix: str


def differences(spec: ClusterSpec, group: Group, path: str) -> Iterator[Problem]:
    """Yield a problem for each further type and each trait in which it differs from the preferred type; types that are not
    known have no traits."""
    first = spec.node_of(group)
    if first is None or not group.other_types:
        return
    by_hand = any(name in spec.instance_types for name in group.ec2_types)
    expected = list(_traits(spec, group.of_type(first.name), first, by_hand))
    for index, name in enumerate(group.other_types):
        alone = group.of_type(name)
        kind = spec.node_of(alone)
        for mine, other in zip(expected, _traits(spec, alone, kind, by_hand) if kind else (), strict=False):
            if mine.value != other.value:
                why = f"{name} has {other.words}, {first.name} {mine.words}"
                yield finding(f"{path}.other_types.{index}", why, other.fix)


def _traits(spec: ClusterSpec, group: Group, kind: Instance, by_hand: bool) -> Iterator[Trait]:
    """Yield the traits of one type; `by_hand`: some type of its group is described by hand."""
    described = kind.name in spec.instance_types
    words = "a description under instance_types" if described else "none under instance_types"
    yield Trait(described, words, "describe all types of the group by hand, or none")
    devices = [(item.kind, item.count, item.memory_mib // 1024) for item in kind.accelerators]
    words = " and ".join(f"{count} {DEVICES[device]} of {memory} GiB" for device, count, memory in devices)
    yield Trait(devices, words or "no accelerators", "take types with as many accelerators, and as much memory on each")
    by_default = group.image_id is None and kind.architecture in CANONICAL
    family = image(spec, group, kind).family if by_default else kind.architecture
    yield Trait(family, f"images for {family}", "take types of one architecture and one maker of accelerators")
    layout = nics(kind, spec.network.nic_policy)
    words = f"network cards: {len(kind.cards)}, EFA interfaces: {kind.efa}"
    yield Trait(layout, words, "set efa: false, or take types with the same network cards")
    older = kind.efa > 0 and kind.name.startswith(NITRO_V3)
    words = f"EFA of Nitro {'v3' if older else 'v4 or newer'}" if kind.efa else "no EFA"
    # Nitro v3 has no RDMA write, and most of it no RDMA read
    # (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-instance-types).
    yield Trait(older, words, "set efa: false, or take types of one Nitro generation")
    gib = kind.memory_mib // 1024
    yield Trait(
        (kind.vcpus, gib), f"{kind.vcpus} vCPUs and {gib} GiB", "take types with as many vCPUs and as much memory"
    )
    options = cpu(group, kind)
    threads = kind.threads_per_core if options else None
    words = f"CPU options for {options.cores} cores" if options else "no CPU options"
    yield Trait(threads, words, "set threads_per_core: 2, or take types with as many cores")
    if by_hand:
        yield Trait(kind.nvme_count, f"{kind.nvme_count} local drives", "take types with as many local drives")
    else:
        words = "local drives" if kind.nvme_count else "no local drives"
        yield Trait(bool(kind.nvme_count), words, "take types that all have local drives, or none")
    placed = market(group, kind).own_placement_group
    words = "a place in a cluster placement group" if placed else "none in a cluster placement group"
    yield Trait(placed, words, "set placement: none")
    sold = "spot" in kind.usage
    yield Trait(sold, "a spot market" if sold else "no spot market", "take a type that is sold as spot")
    lustre = lustre_efa(kind) if efa_wanted(spec) else 0
    yield Trait(lustre, f"{lustre} EFA interfaces for Lustre", "set efa: false, or take types alike")
