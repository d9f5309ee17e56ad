"""The VPC of a cluster as data: subnets, routes, endpoints and flow logs, and how many addresses its nodes take.

All nodes and file systems lie in one private subnet of one zone: EFA does not leave a zone, and traffic between zones is
billed. A group that names another zone has a subnet of the same size there. Zones are named by id, which means the same
place in every account, so that it compares with the zone of a reservation or a training plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Literal

from infra.config import ClusterSpec, ExistingNetwork, Group, HomeType
from infra.finding import finding
from infra.plan.network.endpoints import EndpointPlan, endpoints, interface_services
from infra.plan.nodes.nics import addresses, nics
from infra.plan.place import PRIVATE_RANGES, Place
from infra.plan.roles import RolePlan, flow_log_group, flow_log_role
from infra.plan.storage.lustre import lustre_plan
from infra.plan.watch.observability import log_days
from lustrain.problem import Problem, UserError, problem

RESERVED = 5
"""Addresses that AWS keeps in each subnet (https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html)."""
VPC_BLOCKS = "https://docs.aws.amazon.com/vpc/latest/userguide/vpc-cidr-blocks.html"
SHORTEST_PREFIX, LONGEST_PREFIX = 16, 28
"""A VPC's block and a subnet have a prefix between these (VPC_BLOCKS)."""
PUBLIC_PREFIX = 24
CONTROL_PREFIX = 27
"""EKS wants 6 free addresses in each of its subnets and advises 16
(https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html)."""
PRIVATE = tuple(map(IPv4Network, PRIVATE_RANGES))
TAKEN = IPv4Network("172.17.0.0/16")
"""Docker's bridge, and some services of AWS (VPC_BLOCKS)."""
CNI_ADDRESSES = 49
"""What the VPC CNI takes for pods on a node at first: the secondary addresses of one interface, of which large types have
50 (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/AvailableIpPerENI.html). With one address a network card, as
HyperPod has it, that makes the 32 (Slurm) and 81 (EKS) addresses that its networking guides name for a p5."""
LUSTRE_GIB_A_SERVER = 1200
TIERED_MB_S_A_SERVER = 2000
"""An interface for each file server and one for metadata. AWS does not say how many servers there are: these figures are
ours, on the safe side."""
HOME_ADDRESSES: Mapping[HomeType, int] = {"openzfs": 2, "efs": 1}
"""EFS has one in each zone of nodes."""


@dataclass(frozen=True)
class SubnetPlan:
    """`key` is public, compute, control-0, control-1, or compute-<zone id> for groups in another zone than the cluster's."""

    key: str
    cidr: str
    zone_id: str


@dataclass(frozen=True)
class RouteTablePlan:
    """Which subnets share a table, and where its default route leads."""

    key: str
    subnets: tuple[str, ...]
    default: Literal["none", "internet", "nat"]


@dataclass(frozen=True)
class FlowLogPlan:
    """Flow logs of the whole VPC into a log group of that name, kept for `days`, written under `role`."""

    log_group: str
    days: int
    role: RolePlan


@dataclass(frozen=True)
class NetworkPlan:
    """What to make; with `existing` nothing, and the rest is empty."""

    name: str
    cidr: str = ""
    subnets: tuple[SubnetPlan, ...] = ()
    route_tables: tuple[RouteTablePlan, ...] = ()
    endpoints: tuple[EndpointPlan, ...] = ()
    flow_logs: FlowLogPlan | None = None
    existing: ExistingNetwork | None = None

    @property
    def nat(self) -> bool:
        return any(table.default == "nat" for table in self.route_tables)


def network(spec: ClusterSpec, place: Place) -> NetworkPlan:
    """Return the network that `spec` asks for; UserError where it cannot be laid out, which preflight says before."""
    if spec.network.existing is not None:
        return NetworkPlan(spec.name, existing=spec.network.existing)
    subnets = _subnets(spec)
    return NetworkPlan(
        name=spec.name,
        cidr=spec.network.cidr,
        subnets=subnets,
        route_tables=_route_tables(spec, subnets),
        endpoints=endpoints(spec, place),
        flow_logs=_flow_logs(spec, place) if spec.network.flow_logs else None,
    )


def has_nat(spec: ClusterSpec) -> bool:
    """Return whether the VPC has a NAT gateway; a closed network has none, whatever `nat` says."""
    return spec.network.existing is None and spec.network.nat and not spec.network.closed


def layout(spec: ClusterSpec, vpc: IPv4Network, compute_prefix: int) -> Mapping[str, IPv4Network] | None:
    """Return the subnets by key, disjoint, the largest first; None when `vpc` is too small for them.

    The public one has its place also where there is no NAT, so that turning NAT on or off moves no other subnet. Those of
    further zones come last, in the order of the groups: a group that is added at the end moves nothing.
    """
    prefixes = {"compute": compute_prefix, "public": _within(vpc, PUBLIC_PREFIX, 2)}
    if spec.backend == "hyperpod-eks":
        prefixes |= dict.fromkeys(("control-0", "control-1"), _within(vpc, CONTROL_PREFIX, 3))
    start, blocks = int(vpc.network_address), {}
    for key, prefix in sorted(prefixes.items(), key=lambda item: item[1]):
        size = 1 << (32 - prefix)
        if start + size - 1 > int(vpc.broadcast_address):
            return None
        blocks[key] = IPv4Network((start, prefix))
        start += size
    size = 1 << (32 - compute_prefix)
    for zone in spec.other_zones:
        start = -(-start // size) * size
        if start + size - 1 > int(vpc.broadcast_address):
            return None
        blocks[in_zone(zone)] = IPv4Network((start, compute_prefix))
        start += size
    return blocks


def in_zone(zone_id: str) -> str:
    """Key of the subnet of groups in a zone that is not the cluster's."""
    return f"compute-{zone_id}"


def usable(cidr: str) -> int:
    """Addresses of a subnet that nodes can have."""
    return max(IPv4Network(cidr, strict=False).num_addresses - RESERVED, 0)


def addresses_needed(spec: ClusterSpec, zone_id: str | None = None) -> int:
    """Addresses of a zone's compute subnet that the cluster takes when all nodes run, at most; None: the cluster's zone.

    A node of the `ec2` backend takes those of its launch template's interfaces; HyperPod's takes one for each network
    card, since HyperPod decides on the interfaces, or one with `efa-only` interfaces, and with EKS those that the VPC CNI
    holds ready for pods. File systems and interface endpoints come on top, in the cluster's zone; the NAT gateway and the
    control plane of EKS lie in other subnets.
    """
    there = [group for group in spec.all_groups if spec.zone_of(group) == (zone_id or spec.zone_id)]
    nodes = sum(group.count * _addresses_of_node(spec, group) for group in there)
    config, elsewhere = spec.storage.home, zone_id not in (None, spec.zone_id)
    made = config is not None and config.existing is None
    home = HOME_ADDRESSES[config.type] if config and made and (config.type == "efs" or not elsewhere) else 0
    if elsewhere:
        return nodes + home
    nodes += 1 if spec.monitor else 0
    return nodes + _addresses_of_lustre(spec) + home + len(interface_services(spec))


def _addresses_of_node(spec: ClusterSpec, group: Group) -> int:
    facts = spec.node_of(group)
    if facts is None:
        cards = layout_addresses = 1
    else:
        cards = len(facts.cards) if facts.efa else 1
        layout_addresses = addresses(nics(facts, spec.network.nic_policy))
    if spec.backend == "ec2":
        return layout_addresses
    if group.interface_type == "efa-only":
        cards = 1
    return cards + (CNI_ADDRESSES if spec.backend == "hyperpod-eks" else 0)


def _addresses_of_lustre(spec: ClusterSpec) -> int:
    plan = lustre_plan(spec)
    if plan is None or plan.existing is not None:
        return 0
    servers = (plan.capacity_gib or 0) / LUSTRE_GIB_A_SERVER + (plan.tiered_mb_s or 0) / TIERED_MB_S_A_SERVER
    return math.ceil(servers) + 1


def _within(vpc: IPv4Network, prefix: int, share: int) -> int:
    """In a small VPC a subnet gets a 2^share-th of it, as long as that is a legal subnet."""
    return min(max(prefix, vpc.prefixlen + share), LONGEST_PREFIX)


def _subnets(spec: ClusterSpec) -> tuple[SubnetPlan, ...]:
    vpc, refused = _block(spec.network.cidr), [item for item in cidr_problems(spec) if item.level == "error"]
    cidrs = layout(spec, vpc, spec.network.compute_prefix) if vpc and not refused else None
    if cidrs is None:
        raise UserError(refused)
    zones = {"compute": spec.zone_id}
    if has_nat(spec):
        zones["public"] = spec.zone_id
    if spec.backend == "hyperpod-eks":
        zones |= {"control-0": spec.zone_id, "control-1": _second_zone(spec)}
    zones |= {in_zone(zone): zone for zone in spec.other_zones}
    return tuple(SubnetPlan(key, str(cidrs[key]), zone) for key, zone in zones.items())


def _second_zone(spec: ClusterSpec) -> str:
    if spec.network.second_zone_id in (None, spec.zone_id):
        why = "the control plane of EKS needs subnets in two zones"
        fix = "name another zone of the region: aws ec2 describe-availability-zones"
        raise UserError(problem("network.second_zone_id", spec.network.second_zone_id, why, fix=fix))
    return str(spec.network.second_zone_id)


def _route_tables(spec: ClusterSpec, subnets: tuple[SubnetPlan, ...]) -> tuple[RouteTablePlan, ...]:
    inner = tuple(subnet.key for subnet in subnets if subnet.key != "public")
    if not has_nat(spec):
        return (RouteTablePlan("private", inner, "none"),)
    return (RouteTablePlan("private", inner, "nat"), RouteTablePlan("public", ("public",), "internet"))


def _flow_logs(spec: ClusterSpec, place: Place) -> FlowLogPlan:
    return FlowLogPlan(flow_log_group(spec), log_days(spec.observability.log_days), flow_log_role(spec, place))


def _block(cidr: str) -> IPv4Network | None:
    try:
        return IPv4Network(cidr)
    except ValueError:
        return None


def cidr_problems(spec: ClusterSpec) -> Iterator[Problem]:
    """All that is wrong with the blocks of `spec.network`; of an existing network, with `compute_cidr` alone."""
    existing = spec.network.existing
    path, cidr = ("network.cidr", spec.network.cidr)
    if existing is not None:
        if existing.compute_cidr is None:
            return
        path, cidr = "network.existing.compute_cidr", existing.compute_cidr
    block = _block(cidr)
    if block is None:
        fix = "write the first address and the prefix's length, like 10.0.0.0/16"
        yield finding(path, f"{cidr} is not an IPv4 block", fix, code="NET-003")
        return
    if not SHORTEST_PREFIX <= block.prefixlen <= LONGEST_PREFIX:
        why, fix = (
            f"{cidr} has a size that AWS refuses",
            f"choose a prefix from /{SHORTEST_PREFIX} to /{LONGEST_PREFIX}",
        )
        yield finding(path, why, fix, code="NET-003")
        return
    if existing is not None:
        return
    yield from _awkward(path, block)
    prefix = spec.network.compute_prefix
    if layout(spec, block, prefix) is None:
        why = f"a compute subnet of /{prefix} and the small subnets beside it do not fit into {block}"
        smaller = (entry for entry in range(prefix + 1, LONGEST_PREFIX + 1) if layout(spec, block, entry))
        fits = next((f"raise compute_prefix to {item} or " for item in smaller), "")
        fix = f"{fits}take a larger network.cidr"
        yield finding("network.compute_prefix", why, fix, code="NET-004")


def _awkward(path: str, block: IPv4Network) -> Iterator[Problem]:
    if not any(block.subnet_of(private) for private in PRIVATE):
        why = f"{block} is not a private range: nodes cannot reach the owners of these addresses in the internet"
        fix = "choose a block of 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16 or 100.64.0.0/10"
        yield finding(path, why, fix, code="NET-006", level="warning")
    if block.overlaps(TAKEN):
        why = f"{block} overlaps {TAKEN}, where Docker's bridge and some services of AWS are"
        fix = "choose another block, like 10.0.0.0/16"
        yield finding(path, why, fix, code="NET-006", level="warning")
