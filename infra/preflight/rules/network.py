"""NET: zones, address ranges and ways out. The counting of addresses is `infra.plan.network.vpc`'s."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.network.endpoints import KEYS_REGION, needed_services
from infra.plan.network.security import ipv4_block, too_wide
from infra.plan.network.vpc import RESERVED, SHORTEST_PREFIX, VPC_BLOCKS, addresses_needed, cidr_problems, usable
from infra.plan.nodes.logs import carries_logs
from infra.plan.place import host
from infra.preflight.rule import Context, Family, groups, listed, named_twice

ZONES = "https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html"
SUBNETS = "https://docs.aws.amazon.com/vpc/latest/userguide/subnet-sizing.html"
NAT = "https://docs.aws.amazon.com/vpc/latest/userguide/vpc-nat-gateway.html"
GROUPS = "https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html#vpc-limits-security-groups"
MOST_GROUPS = 5
"""Security groups of an interface unless the account has a higher quota (GROUPS); HyperPod never takes more
(https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_VpcConfig.html)."""
INGRESS = "https://docs.aws.amazon.com/vpc/latest/userguide/security-group-rules.html"
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
RULES = Family()


def zone_prefix(region: str) -> str | None:
    """Return what zone ids of a region begin with: `use1` for us-east-1, `usgw1` for us-gov-west-1; None if unknown."""
    match = re.fullmatch(r"([a-z]{2})(-gov)?-([a-z]+)-(\d)", region)
    if not match or match[3] not in _DIRECTIONS:
        return None
    return f"{match[1]}{'g' if match[2] else ''}{_DIRECTIONS[match[3]]}{match[4]}"


def elsewhere(zone_id: str, region: str | None) -> bool:
    """Return whether a zone id is surely not of the region."""
    prefix = zone_prefix(region) if region else None
    return prefix is not None and not zone_id.startswith(f"{prefix}-")


def named_zones(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield every zone id that the cluster, its control plane and its groups name, with its path."""
    yield "zone_id", spec.zone_id
    if spec.network.second_zone_id:
        yield "network.second_zone_id", spec.network.second_zone_id
    for path, group in groups(spec):
        if group.zone_id:
            yield f"{path}.zone_id", group.zone_id


@RULES.add("NET-001", "The zones of the cluster and of its groups are in the region.", ZONES, essential=True)
@RULES.add("NET-002", "The control plane's second zone is in the region.", ZONES, essential=True)
def zone_of_region(spec: ClusterSpec, context: Context) -> Problems:
    for path, zone in named_zones(spec):
        if context.region and elsewhere(zone, context.region):
            message = f"{zone} is not a zone of {context.region}, whose ids begin with {zone_prefix(context.region)}"
            code = "NET-002" if path == "network.second_zone_id" else "NET-001"
            yield finding(path, message, "change it, or aws:region" if path == "zone_id" else "change it", code=code)


@RULES.add(
    "NET-003",
    "The VPC's range, or an existing subnet's, is one that AWS takes: a block from /16 to /28.",
    VPC_BLOCKS,
    essential=True,
)
@RULES.add("NET-004", "The compute subnet and the small ones beside it fit into the VPC.", VPC_BLOCKS, essential=True)
@RULES.add("NET-006", "The VPC's range is a private one, and not Docker's 172.17.0.0/16.", VPC_BLOCKS, level="warning")
def plan_problems(spec: ClusterSpec, context: Context) -> Problems:
    return cidr_problems(spec)


@RULES.add(
    "NET-005",
    "The compute subnet has enough addresses for all interfaces of nodes, for file systems and endpoints.",
    SUBNETS,
)
def enough_addresses(spec: ClusterSpec, context: Context) -> Problems:
    path, cidr = _compute_range(spec)
    needed = _most_addresses(spec)
    if cidr and usable(cidr) < needed:
        # A prefix shorter than any VPC's would not help.
        prefix = 32 - math.ceil(math.log2(needed + RESERVED))
        fix = "lower counts" if prefix < SHORTEST_PREFIX else f"take a /{prefix} or larger"
        yield finding(path, f"{usable(cidr)} usable addresses, the cluster takes {needed}", fix)


@RULES.add(
    "NET-007",
    "Nodes reach AWS's services: through NAT, or through the endpoints of a closed network.",
    NAT,
    judgement=True,
)
def no_way_out(spec: ClusterSpec, context: Context) -> Problems:
    network = spec.network
    if network.existing is None and not network.nat and not network.closed:
        message = "without NAT and endpoints nodes reach neither SSM nor ECR nor the service that made them"
        yield finding("network.nat", message, "remove it, or set closed: true")


@RULES.add("NET-008", "A closed network has no NAT.", NAT, level="warning")
def closed_with_nat(spec: ClusterSpec, context: Context) -> Problems:
    network = spec.network
    if network.closed and network.nat and "nat" in network.model_fields_set:
        yield finding("network.nat", "has no effect with closed: true", "remove one of the two")


@RULES.add(
    "NET-009",
    "No key of a new network stands beside an existing one: that is used as it is.",
    "infra/config.py",
    level="warning",
)
def with_existing(spec: ClusterSpec, context: Context) -> Problems:
    network = spec.network
    if network.existing is None:
        return
    for key in ("cidr", "compute_prefix", "second_zone_id", "nat", "flow_logs"):
        if key in network.model_fields_set:
            yield finding(f"network.{key}", "has no effect with an existing network", "remove it")


@RULES.add(
    "NET-010",
    "An existing closed network has the endpoints that nodes need: none are made there.",
    ENDPOINTS,
    level="warning",
)
def existing_closed(spec: ClusterSpec, context: Context) -> Problems:
    if spec.network.existing and spec.network.closed:
        needed = listed((*needed_services(spec), "s3 (gateway)"))
        yield finding(
            "network.closed",
            f"makes nothing in an existing network, where nodes need endpoints for {needed}",
            "make them, then suppress this",
        )


@RULES.add(
    "NET-011", "Each subnet is named once.", "https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html"
)
def subnet_twice(spec: ClusterSpec, context: Context) -> Problems:
    subnets = spec.network.existing.control_subnet_ids if spec.network.existing else ()
    return named_twice("network.existing.control_subnet_ids", subnets, "name another subnet, in another zone")


@RULES.add(
    "NET-012",
    "A closed network pulls images from ECR of its region: nothing else is reached.",
    "https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html",
    judgement=True,
)
def closed_registry(spec: ClusterSpec, context: Context) -> Problems:
    url = spec.repository.existing
    if not url or not spec.network.closed:
        return
    registry = host(url.partition("/")[0], "dkr.ecr")
    if not registry:
        message = f"{url} is not ECR, and a closed network reaches nothing else"
        yield finding("repository.existing", message, "copy the image to ECR, or remove closed")
    elif context.region and registry.region != context.region:
        message = f"{url} is in {registry.region}, and the endpoints are those of {context.region}"
        yield finding("repository.existing", message, "replicate the repository to the region")


@RULES.add(
    "NET-013",
    "Helm charts of a closed EKS cluster come with their images: public registries are not reached.",
    "https://docs.aws.amazon.com/eks/latest/userguide/private-clusters.html",
    level="warning",
)
def closed_helm(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend == "hyperpod-eks" and spec.network.closed:
        message = "nodes pull no image from a public registry, which HyperPod's Helm charts name"
        yield finding("network.closed", message, "copy the charts' images to ECR and set their registry values")


@RULES.add(
    "NET-014",
    "The compute subnet has twice the addresses that the cluster takes: old nodes hold theirs while new ones come.",
    "https://github.com/awslabs/awsome-distributed-ai/issues/1122",
    level="warning",
)
def spare_addresses(spec: ClusterSpec, context: Context) -> Problems:
    path, cidr = _compute_range(spec)
    needed = _most_addresses(spec)
    if cidr and needed <= usable(cidr) < 2 * needed:
        message = f"{usable(cidr)} usable addresses, the cluster takes {needed}: replacing all nodes at once fails"
        yield finding(path, message, "take a larger subnet")


@RULES.add("NET-018", "An interface has at most 5 security groups, the cluster's own among them, each once.", GROUPS)
@RULES.add("NET-019", "Further security groups are those of an existing network: a group belongs to one VPC.", INGRESS)
def further_groups(spec: ClusterSpec, context: Context) -> Problems:
    here, further = "network.security_group_ids", spec.network.security_group_ids
    joins = spec.backend == "hyperpod-eks" and spec.eks.existing is not None
    own = f"the cluster's own{' and that of the existing EKS cluster' if joins else ''}"
    if len(further) + joins >= MOST_GROUPS:
        message = f"{len(further)} groups and {own} are more than {MOST_GROUPS} on an interface"
        yield finding(here, message, f"name {MOST_GROUPS - 1 - joins} at most", code="NET-018")
    yield from named_twice(here, further, code="NET-018")
    if further and spec.network.existing is None:
        message = "the stack makes a new VPC, in which these groups are not"
        yield finding(here, message, "name the VPC in network.existing, or use network.allow_from", code="NET-019")


@RULES.add(
    "NET-021",
    "Ranges that reach the nodes by SSH are IPv4 ranges, written from their first address.",
    INGRESS,
    essential=True,
)
@RULES.add("NET-022", "SSH to the nodes is not open to the internet.", INGRESS, essential=True)
def ssh_sources(spec: ClusterSpec, context: Context) -> Problems:
    for index, text in enumerate(spec.network.allow_from):
        path, block = f"network.allow_from.{index}", ipv4_block(text)
        if text.startswith("pl-"):
            continue
        if block is None:
            whole = ipv4_block(text, strict=False)
            fix = f"write {whole}, or /32 for the one address" if whole else "write it like 10.20.0.0/16"
            yield finding(path, f"{text} is not a range from its first address", fix, code="NET-021")
        elif too_wide(block):
            message = f"SSH would be open to {block.num_addresses:,} addresses"
            yield finding(path, message, "name the ranges of your network", code="NET-022")


@RULES.add(
    "NET-023",
    "A proxy's address holds no user and password: every job on a node could read them.",
    "infra/config.py",
    essential=True,
)
@RULES.add(
    "NET-024",
    "Nodes reach the proxy: those of a closed network that the stack makes reach nothing outside of it.",
    "infra/plan/network/security.py",
    judgement=True,
)
def proxy(spec: ClusterSpec, context: Context) -> Problems:
    here, proxy_config = "network.proxy", spec.network.proxy
    for key in ("http", "https"):
        if proxy_config and "@" in (getattr(proxy_config, key) or ""):
            message = "holds a user or a password"
            yield finding(f"{here}.{key}", message, "let the proxy admit the nodes by their addresses", code="NET-023")
    if proxy_config and spec.network.closed and spec.network.existing is None:
        message = "lies outside of the VPC, which lets nothing out"
        yield finding(here, message, "remove it, or name the network that the proxy is in", code="NET-024")


@RULES.add(
    "NET-025",
    "Keys about your own network stand beside network.existing: a VPC that the stack makes has no way from or to it.",
    "https://docs.aws.amazon.com/vpc/latest/userguide/how-it-works.html",
    level="warning",
)
def own_network(spec: ClusterSpec, context: Context) -> Problems:
    if spec.network.existing is not None or spec.network.closed:
        return
    for key in ("allow_from", "proxy"):
        if getattr(spec.network, key):
            message = "nodes have private addresses in a VPC of their own, which has no peering, VPN or transit gateway"
            yield finding(
                f"network.{key}", message, "name the network in network.existing, or connect the VPC yourself"
            )


@RULES.add(
    "NET-026",
    "On EC2 the proxy is reached by plain http: the SSM agent takes no https proxy.",
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/configure-proxy-ssm-agent.html",
    level="warning",
)
def https_proxy(spec: ClusterSpec, context: Context) -> Problems:
    proxy = spec.network.proxy
    for key in ("http", "https"):
        if proxy and spec.backend == "ec2" and (getattr(proxy, key) or "").startswith("https://"):
            yield finding(f"network.proxy.{key}", "SSM sessions fail through it", "write its http:// address")


@RULES.add(
    "NET-027",
    "SSH that is let in has a key pair on the nodes.",
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-key-pairs.html",
    level="warning",
)
def ssh_without_key(spec: ClusterSpec, context: Context) -> Problems:
    if spec.network.allow_from and spec.backend == "ec2" and spec.access.ssh_key is None:
        yield finding(
            "access.ssh_key", "no key of yours is on the nodes", "name a key pair, or remove network.allow_from"
        )


@RULES.add(
    "NET-028",
    "In a closed network nodes get the CloudWatch agent's package and its key, or have the agent in their image.",
    "https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/verify-CloudWatch-Agent-Package-Signature.html",
    level="warning",
)
def agent_key(spec: ClusterSpec, context: Context) -> Problems:
    """HyperPod's images have the agent, EKS gets it as an add-on, and of the package for x86_64 nodes know the digest."""
    elsewhere = context.region is not None and context.region != KEYS_REGION
    kinds = [spec.type_of(group) for group in spec.all_groups if group.image_id is None]
    arm = any(kind and kind.architecture == "arm64" for kind in kinds)
    if arm and elsewhere and spec.network.closed and spec.backend == "ec2" and carries_logs(spec):
        message = (
            f"arm64 nodes get the CloudWatch agent from S3 of {context.region}, but the key of its package is published in "
            f"{KEYS_REGION}, which they may not reach: without the agent in their image their logs stay on them"
        )
        fix = "take an image that has the agent, or set observability.logs: false"
        yield finding("network.closed", message, fix)


def _most_addresses(spec: ClusterSpec) -> int:
    """Return the addresses of the fullest compute subnet; all have one size, and of an existing network only one is known."""
    zones = () if spec.network.existing else spec.other_zones
    return max(addresses_needed(spec, zone) for zone in (spec.zone_id, *zones))


def _compute_range(spec: ClusterSpec) -> tuple[str, str | None]:
    """Return the key of the compute subnet's size, and a block of that size; None where it is not known or illegal."""
    if any(problem.level == "error" for problem in cidr_problems(spec)):
        return "", None
    if spec.network.existing:
        return "network.existing.compute_cidr", spec.network.existing.compute_cidr
    return "network.compute_prefix", f"0.0.0.0/{spec.network.compute_prefix}"
