"""NET: zones, address ranges and ways out. The counting of addresses is `infra.plan.network.vpc`'s."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from infra.config import ClusterSpec
from infra.plan.network.endpoints import ALWAYS, BY_BACKEND
from infra.plan.network.vpc import RESERVED, SHORTEST_PREFIX, VPC_BLOCKS, addresses_needed, cidr_problems, usable
from infra.plan.place import host
from infra.preflight.finding import Finding
from infra.preflight.rule import Context, OfflineRule, groups, listed

ZONES = "https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html"
SUBNETS = "https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html"
NAT = "https://docs.aws.amazon.com/vpc/latest/userguide/vpc-nat-gateway.html"
ENDPOINTS = "https://docs.aws.amazon.com/vpc/latest/privatelink/create-interface-endpoint.html"
_DIRECTIONS = {
    "north": "n",
    "south": "s",
    "east": "e",
    "west": "w",
    "central": "c",
    "northeast": "ne",
    "northwest": "nw",
    "southeast": "se",
    "southwest": "sw",
}


def zone_prefix(region: str) -> str | None:
    """What zone ids of a region begin with: `use1` for us-east-1, `usgw1` for us-gov-west-1; None for another pattern."""
    found = re.fullmatch(r"([a-z]{2})(-gov)?-([a-z]+)-(\d)", region)
    if not found or found[3] not in _DIRECTIONS:
        return None
    return f"{found[1]}{'g' if found[2] else ''}{_DIRECTIONS[found[3]]}{found[4]}"


def elsewhere(zone_id: str, region: str | None) -> bool:
    """Whether a zone id is surely not of the region."""
    prefix = zone_prefix(region) if region else None
    return prefix is not None and not zone_id.startswith(f"{prefix}-")


def _of_other_region(zone_id: str, context: Context) -> str:
    return f"{zone_id} is not a zone of {context.region}, whose ids begin with {zone_prefix(context.region or '')}"


class ZoneOfRegion(OfflineRule):
    code = "NET-001"
    checks = "The zone is one of the region, and so are those of groups."
    source = ZONES
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if elsewhere(spec.zone_id, context.region):
            message = _of_other_region(spec.zone_id, context)
            yield self.finding("zone_id", message, "change it, or aws:region")
        for path, group in groups(spec):
            if group.zone_id and elsewhere(group.zone_id, context.region):
                yield self.finding(f"{path}.zone_id", _of_other_region(group.zone_id, context), "change it")


class SecondZoneOfRegion(OfflineRule):
    code = "NET-002"
    checks = "The control plane's second zone is one of the region."
    source = ZONES
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        zone = spec.network.second_zone_id
        if zone and elsewhere(zone, context.region):
            message = (
                f"{zone} is not a zone of {context.region}, whose ids begin with {zone_prefix(context.region or '')}"
            )
            yield self.finding("network.second_zone_id", message, "change it")


class VpcRange(OfflineRule):
    code = "NET-003"
    checks = "The VPC's range, or an existing subnet's, is one that AWS takes: a block from /16 to /28."
    source = VPC_BLOCKS
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for one in cidr_problems(spec):
            if one.level == "error" and one.path != "network.compute_prefix":
                yield self.finding(one.path, f"{one.value} {one.message}", one.fix, source=one.source)


class ComputeFits(OfflineRule):
    code = "NET-004"
    checks = "The compute subnet and the small ones beside it fit into the VPC."
    source = VPC_BLOCKS
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for one in cidr_problems(spec):
            if one.path == "network.compute_prefix":
                yield self.finding(one.path, one.message, one.fix, source=one.source)


class EnoughAddresses(OfflineRule):
    code = "NET-005"
    checks = "The compute subnet has an address for every interface of every node, the file systems and the endpoints."
    source = SUBNETS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        path, cidr = _compute_range(spec)
        needed = _most_addresses(spec)
        if cidr and usable(cidr) < needed:
            # A prefix shorter than any VPC's would not help.
            prefix = 32 - math.ceil(math.log2(needed + RESERVED))
            fix = "lower counts" if prefix < SHORTEST_PREFIX else f"take a /{prefix} or larger"
            yield self.finding(path, f"{usable(cidr)} usable addresses, the cluster takes {needed}", fix)


class AwkwardRange(OfflineRule):
    code = "NET-006"
    level = "warning"
    checks = "The VPC's range is a private one, and not Docker's 172.17.0.0/16."
    source = VPC_BLOCKS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for one in cidr_problems(spec):
            if one.level == "warning":
                yield self.finding(one.path, f"{one.value} {one.message}", one.fix, source=one.source)


class NoWayOut(OfflineRule):
    code = "NET-007"
    checks = "Nodes reach AWS's services: through NAT, or through the endpoints of a closed network."
    source = NAT
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        network = spec.network
        if network.existing is None and not network.nat and not network.closed:
            message = "without NAT and endpoints nodes reach neither SSM nor ECR nor the service that made them"
            yield self.finding("network.nat", message, "remove it, or set closed: true")


class ClosedWithNat(OfflineRule):
    code = "NET-008"
    level = "warning"
    checks = "A closed network is not asked for NAT."
    source = NAT

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        network = spec.network
        if network.closed and network.nat and "nat" in network.model_fields_set:
            yield self.finding("network.nat", "has no effect with closed: true", "remove one of the two")


class WithExisting(OfflineRule):
    code = "NET-009"
    level = "warning"
    checks = "Nothing is asked of an existing network: it is used as it is."
    source = "infra/config.py"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        network = spec.network
        if network.existing is None:
            return
        for key in ("cidr", "compute_prefix", "second_zone_id", "nat", "flow_logs"):
            if key in network.model_fields_set:
                yield self.finding(f"network.{key}", "has no effect with an existing network", "remove it")


class ExistingClosed(OfflineRule):
    code = "NET-010"
    level = "warning"
    checks = "An existing closed network has the endpoints that nodes need: none are made there."
    source = ENDPOINTS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.network.existing and spec.network.closed:
            needed = listed((*ALWAYS, *BY_BACKEND[spec.backend], "s3 (gateway)"))
            yield self.finding(
                "network.closed",
                f"makes nothing in an existing network, where nodes need endpoints for {needed}",
                "make them, then suppress this",
            )


class SubnetTwice(OfflineRule):
    code = "NET-011"
    checks = "Each subnet is named once."
    source = "https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        found = spec.network.existing.control_subnet_ids if spec.network.existing else ()
        for index, one in enumerate(found):
            if one in found[:index]:
                path = f"network.existing.control_subnet_ids.{index}"
                yield self.finding(path, f"{one} stands twice", "name another subnet, in another zone")


class ClosedRegistry(OfflineRule):
    code = "NET-012"
    checks = "A closed network pulls images from ECR of its region: nothing else is reached."
    source = "https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        url = spec.repository.existing
        if not url or not spec.network.closed:
            return
        found = host(url.partition("/")[0], "dkr.ecr")
        if not found:
            message = f"{url} is not ECR, and a closed network reaches nothing else"
            yield self.finding("repository.existing", message, "copy the image to ECR, or remove closed")
        elif context.region and found.region != context.region:
            message = f"{url} is in {found.region}, and the endpoints are those of {context.region}"
            yield self.finding("repository.existing", message, "replicate the repository to the region")


class ClosedHelm(OfflineRule):
    code = "NET-013"
    level = "warning"
    checks = "Helm charts of a closed EKS cluster come with their images: public registries are not reached."
    source = "https://docs.aws.amazon.com/eks/latest/userguide/private-clusters.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.backend == "hyperpod-eks" and spec.network.closed:
            message = "nodes pull no image from a public registry, which HyperPod's Helm charts name"
            yield self.finding(
                "network.closed", message, "copy the charts' images to ECR and set their registry values"
            )


class SpareAddresses(OfflineRule):
    code = "NET-014"
    level = "warning"
    checks = (
        "The compute subnet has twice the addresses that the cluster takes: old nodes hold theirs while new ones come."
    )
    source = "https://github.com/awslabs/awsome-distributed-ai/issues/1122"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        path, cidr = _compute_range(spec)
        needed = _most_addresses(spec)
        if cidr and needed <= usable(cidr) < 2 * needed:
            message = f"{usable(cidr)} usable addresses, the cluster takes {needed}: replacing all nodes at once fails"
            yield self.finding(path, message, "take a larger subnet")


def _most_addresses(spec: ClusterSpec) -> int:
    """What the fullest compute subnet must hold: they all have one size. Of an existing network one is known by its size."""
    zones = () if spec.network.existing else spec.other_zones
    return max(addresses_needed(spec, zone) for zone in (spec.zone_id, *zones))


def _compute_range(spec: ClusterSpec) -> tuple[str, str | None]:
    """The key that the compute subnet's size comes from, and a block of its size; None where it is not known or illegal."""
    if any(one.level == "error" for one in cidr_problems(spec)):
        return "", None
    if spec.network.existing:
        return "network.existing.compute_cidr", spec.network.existing.compute_cidr
    return "network.compute_prefix", f"0.0.0.0/{spec.network.compute_prefix}"


RULES = (
    ZoneOfRegion(),
    SecondZoneOfRegion(),
    VpcRange(),
    ComputeFits(),
    EnoughAddresses(),
    AwkwardRange(),
    NoWayOut(),
    ClosedWithNat(),
    WithExisting(),
    ExistingClosed(),
    SubnetTwice(),
    ClosedRegistry(),
    ClosedHelm(),
    SpareAddresses(),
)
