"""NET 1xx: the zone, and an existing network as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.aws import Aws, answered
from infra.config import ClusterSpec, ExistingNetwork
from infra.finding import Problems, finding
from infra.plan.network.endpoints import endpoints
from infra.plan.network.security import ipv4_block, too_wide
from infra.plan.network.vpc import addresses_needed
from infra.preflight.online.answers import missing, quotas_of
from infra.preflight.rule import Context, Family, known_groups, listed
from infra.preflight.rules.network import named_zones

SUBNET = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_Subnet.html"
COMPUTE, CONTROL = "network.existing.compute_subnet_id", "network.existing.control_subnet_ids"
ZONAL = "network.existing.zone_subnet_ids"
RULES = Family()


@RULES.add(
    "NET-101",
    "The zones are there, open to the account, and available.",
    "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeAvailabilityZones.html",
    permission="ec2:DescribeAvailabilityZones",
)
def zones(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    zones = aws.ec2.describe_availability_zones(AllAvailabilityZones=True)["AvailabilityZones"]
    known = {str(item.get("ZoneId")): item for item in zones}
    for path, zone in named_zones(spec):
        there = known.get(zone)
        if there is None:
            fix = f"choose one of {listed(sorted(known))}"
            yield finding(path, f"{zone} is not a zone of {aws.region}", fix)
        elif there.get("OptInStatus") == "not-opted-in":
            fix = (
                f"aws ec2 modify-availability-zone-group --group-name {there.get('GroupName')} --opt-in-status opted-in"
            )
            yield finding(path, f"{zone} is not opted in", fix)
        elif there.get("State") != "available":
            yield finding(path, f"{zone} is {there.get('State')}", "choose another zone")


@RULES.add(
    "NET-102",
    "Existing subnets are there, of the VPC, the compute ones in their zones, the control ones in two.",
    SUBNET,
    permission="ec2:DescribeSubnets",
)
def subnets(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    existing = spec.network.existing
    if existing is None:
        return
    compute = subnet(aws, existing.compute_subnet_id)
    control = {entry: subnet(aws, entry) for entry in existing.control_subnet_ids}
    zonal = {zone: subnet(aws, one) for zone, one in existing.zone_subnet_ids.items()}
    for path, named, there in [
        (COMPUTE, existing.compute_subnet_id, compute),
        *((CONTROL, *item) for item in control.items()),
        *((f"{ZONAL}.{zone}", existing.zone_subnet_ids[zone], there) for zone, there in zonal.items()),
    ]:
        if there is None:
            yield missing(path, named)
        elif there["VpcId"] != existing.vpc_id:
            yield finding(path, f"{named} is of {there['VpcId']}, not of {existing.vpc_id}", "make them equal")
    if compute and compute["AvailabilityZoneId"] != spec.zone_id:
        zone = compute["AvailabilityZoneId"]
        yield finding(COMPUTE, f"lies in {zone}, the cluster in {spec.zone_id}", f"set zone_id: {zone}")
    for zone, there in zonal.items():
        if there and (lies := there["AvailabilityZoneId"]) != zone:
            yield finding(f"{ZONAL}.{zone}", f"lies in {lies}", f"name it under {lies}, or name another subnet here")
    zones = {there["AvailabilityZoneId"] for there in control.values() if there}
    if spec.backend == "hyperpod-eks" and control and len(zones) < 2:
        yield finding(CONTROL, f"all lie in {listed(zones)}; EKS needs two zones", "add one in another zone")


@RULES.add(
    "NET-103", "An existing compute subnet has enough free addresses now.", SUBNET, permission="ec2:DescribeSubnets"
)
def free_addresses(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    there = subnet(aws, spec.network.existing.compute_subnet_id) if spec.network.existing else None
    needed = addresses_needed(spec)
    if there and there["AvailableIpAddressCount"] < needed:
        message = (
            f"{there['AvailableIpAddressCount']} free addresses of {there['CidrBlock']}, the cluster takes {needed}"
        )
        yield finding(COMPUTE, message, "take a larger subnet, or lower counts")


@RULES.add(
    "NET-104",
    "An existing compute subnet gives no public addresses: a node with several interfaces cannot start with one.",
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-instance-addressing.html",
    permission="ec2:DescribeSubnets",
)
def public_addresses(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    there = subnet(aws, spec.network.existing.compute_subnet_id) if spec.network.existing else None
    if there and there.get("MapPublicIpOnLaunch") and any(facts.efa for *_, facts in known_groups(spec)):
        message = "gives public addresses, which no node with several interfaces can have"
        yield finding(COMPUTE, message, "take a private subnet with NAT or endpoints")


@RULES.add(
    "NET-105",
    "An existing VPC has DNS support and host names, by which file systems and endpoints are found.",
    "https://docs.aws.amazon.com/vpc/latest/userguide/AmazonDNS-concepts.html",
    permission="ec2:DescribeVpcAttribute",
)
def dns(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    if spec.network.existing is None:
        return
    vpc = spec.network.existing.vpc_id
    describe = aws.ec2.describe_vpc_attribute
    support = answered("InvalidVpcID.NotFound", describe, VpcId=vpc, Attribute="enableDnsSupport")
    if support is None:
        yield missing("network.existing.vpc_id", vpc)
        return
    names = describe(VpcId=vpc, Attribute="enableDnsHostnames")
    for what, attribute in (
        ("DNS support", support["EnableDnsSupport"]),
        ("DNS host names", names["EnableDnsHostnames"]),
    ):
        if not attribute.get("Value"):
            yield finding("network.existing.vpc_id", f"{vpc} has no {what}", "turn it on in the VPC's settings")


@RULES.add(
    "NET-106",
    "Nodes in an existing subnet have a way out, or a proxy, and one to S3 that is neither the proxy nor the NAT gateway.",
    "https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-endpoints-s3.html",
    level="warning",
    permission="ec2:DescribeRouteTables and ec2:DescribeVpcEndpoints",
)
def way_out(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    existing = spec.network.existing
    if existing is None:
        return
    tables = _tables(aws, existing)
    routes = [route for table in tables for route in table.get("Routes", [])]
    default = [route for route in routes if route.get("DestinationCidrBlock") == "0.0.0.0/0"]
    if any(str(route.get("GatewayId", "")).startswith("igw-") for route in default):
        message = "leads to an internet gateway: nodes without public addresses get no answer"
        yield finding(COMPUTE, message, "take a private subnet with NAT or endpoints", level="error")
    has_other_way = spec.network.proxy is not None or spec.network.closed
    if not default and not has_other_way:
        yield finding(COMPUTE, "has no default route", "add one to a NAT gateway, or set closed: true")
    to_s3 = _endpoints_of_s3(aws, existing.vpc_id)
    if any(_is_gateway(endpoint, tables) for endpoint in to_s3):
        return
    if default or not has_other_way:
        past = ", past the proxy," if spec.network.proxy else ""
        message = f"has no gateway endpoint to S3: checkpoints and data{past} pay NAT's price per GB"
        yield finding(COMPUTE, message, ADD_GATEWAY)
    elif not any(map(_is_interface, to_s3)):
        message = "has no way to S3, which nodes reach directly, not through a proxy: their boot fails"
        yield finding(COMPUTE, message, ADD_GATEWAY, level="error")


ADD_GATEWAY = "add a gateway endpoint for S3 to its route table"


def _tables(aws: Aws, existing: ExistingNetwork) -> list[Any]:
    """Return the route tables of the compute subnet; one without a table of its own has the VPC's main one."""
    filters: Any = [{"Name": "vpc-id", "Values": [existing.vpc_id]}]
    pages = aws.ec2.get_paginator("describe_route_tables").paginate(Filters=filters)
    tables: list[Any] = [table for page in pages for table in page["RouteTables"]]
    own = [table for table in tables if _serves(table, existing.compute_subnet_id)]
    return own or [table for table in tables if any(link.get("Main") for link in table.get("Associations", []))]


def _endpoints_of_s3(aws: Aws, vpc: str) -> list[Any]:
    service = f"com.amazonaws.{aws.region}.s3"
    filters: Any = [{"Name": "vpc-id", "Values": [vpc]}]
    pages = aws.ec2.get_paginator("describe_vpc_endpoints").paginate(Filters=filters)
    return [item for page in pages for item in page["VpcEndpoints"] if item.get("ServiceName") == service]


def _is_gateway(endpoint: Any, tables: Sequence[Any]) -> bool:
    """Return whether one of the route tables leads to a gateway endpoint."""
    ids = {table.get("RouteTableId") for table in tables}
    return endpoint.get("VpcEndpointType") == "Gateway" and not ids.isdisjoint(endpoint.get("RouteTableIds", []))


def _is_interface(endpoint: Any) -> bool:
    """Return whether an interface endpoint answers to the service's own name in the VPC, and not only to requests that come
    through an inbound Resolver endpoint from outside
    (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DnsOptions.html)."""
    inbound_only = endpoint.get("DnsOptions", {}).get("PrivateDnsOnlyForInboundResolverEndpoint")
    named = bool(endpoint.get("PrivateDnsEnabled")) and not inbound_only
    return endpoint.get("VpcEndpointType") == "Interface" and named


@RULES.add(
    "NET-107",
    "Further security groups are there, and of the nodes' VPC.",
    "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSecurityGroups.html",
    permission="ec2:DescribeSecurityGroups",
)
def further_groups(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    existing = spec.network.existing
    for index, group in enumerate(spec.network.security_group_ids if existing else ()):
        path, vpc = f"network.security_group_ids.{index}", existing.vpc_id if existing else ""
        answer = answered("InvalidGroup.NotFound", aws.ec2.describe_security_groups, GroupIds=[group])
        if answer is None:
            yield missing(path, group)
        elif (there := answer["SecurityGroups"][0].get("VpcId")) != vpc:
            yield finding(path, f"is of {there}, the nodes of {vpc}", "name a group of the nodes' VPC")


@RULES.add(
    "NET-108",
    "Prefix lists that reach the nodes by SSH are there, hold IPv4 ranges, and not the internet.",
    "https://docs.aws.amazon.com/vpc/latest/userguide/managed-prefix-lists.html",
    permission="ec2:GetManagedPrefixListEntries",
)
def prefix_lists(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for index, source in enumerate(spec.network.allow_from):
        if not source.startswith("pl-"):
            continue
        path = f"network.allow_from.{index}"
        entries = answered("InvalidPrefixListID.NotFound", _entries, aws, source)
        if entries is None:
            yield missing(path, source)
            continue
        blocks = {text: ipv4_block(text) for text in entries}
        if wrong := [text for text, block in blocks.items() if block is None or too_wide(block)]:
            yield finding(path, f"{source} lets {listed(wrong)} in", "name a list of your network's IPv4 ranges")


def _entries(aws: Aws, prefix_list: str) -> list[str]:
    pages = aws.ec2.get_paginator("get_managed_prefix_list_entries").paginate(PrefixListId=prefix_list)
    return [entry["Cidr"] for page in pages for entry in page["Entries"]]


@RULES.add(
    "NET-110",
    "The rules that let SSH in fit into the cluster's security group; a prefix list counts with all that it may ever hold.",
    "https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html#vpc-limits-security-groups",
    permission="ec2:DescribeManagedPrefixLists and servicequotas:ListServiceQuotas",
)
def inbound_rules(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    peers = [rule.peer for rule in context.plan.security if (rule.group, rule.direction) == ("cluster", "ingress")]
    lists = sorted({peer.value for peer in peers if peer.kind == "prefix-list-id"})
    largest = _max_entries(aws, lists) if lists else {}
    needed = sum(largest.get(peer.value, 1) for peer in peers)
    if needed <= INBOUND_RULES:
        return
    quota = quotas_of(aws, "vpc").get(INBOUND_QUOTA, INBOUND_RULES)
    if needed > quota:
        message = f"come to {needed} inbound rules of one security group, but the quota `{INBOUND_QUOTA}` is {quota:g}"
        fix = f"lower the lists' maximum of entries, name fewer, or ask for {needed} in Service Quotas, {aws.region}"
        yield finding("network.allow_from", message, fix)


INBOUND_QUOTA, INBOUND_RULES = "Inbound or outbound rules per security group", 60
"""Name and default of VPC's quota (source of NET-110)."""


def _max_entries(aws: Aws, prefix_lists: Sequence[str]) -> Mapping[str, int]:
    """Return how many entries each list may hold. AWS's own lists have a weight that no API tells: 1 is counted
    (https://docs.aws.amazon.com/vpc/latest/userguide/working-with-aws-managed-prefix-lists.html). Lists that do not exist are
    NET-108's."""
    filters: Any = [{"Name": "prefix-list-id", "Values": prefix_lists}]
    pages = aws.ec2.get_paginator("describe_managed_prefix_lists").paginate(Filters=filters)
    return {item["PrefixListId"]: item.get("MaxEntries", 1) for page in pages for item in page["PrefixLists"]}


@RULES.add(
    "NET-109",
    "The services that a closed network reaches through endpoints are offered in the cluster's zone.",
    "https://docs.aws.amazon.com/vpc/latest/privatelink/create-interface-endpoint.html",
    permission="ec2:DescribeVpcEndpointServices and ec2:DescribeAvailabilityZones",
)
def endpoint_services(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    services = [plan.service for plan in endpoints(spec, context.place) if plan.kind == "Interface"]
    if not services:
        return
    zones = answered("InvalidParameterValue", aws.ec2.describe_availability_zones, ZoneIds=[spec.zone_id])
    if zones is None:
        return  # NET-101 says that there is no such zone.
    zone = zones["AvailabilityZones"][0]["ZoneName"]
    filters: Any = [{"Name": "service-name", "Values": services}]
    pages = aws.ec2.get_paginator("describe_vpc_endpoint_services").paginate(Filters=filters)
    offered = {item["ServiceName"]: item["AvailabilityZones"] for page in pages for item in page["ServiceDetails"]}
    for service in services:
        if zone not in offered.get(service, ()):
            where = f"in {spec.zone_id}" if service in offered else f"in {aws.region}"
            fix = "set closed: false, choose another zone, or remove the key that needs the service"
            yield finding("network.closed", f"{service} has no endpoints {where}", fix)


def subnet(aws: Aws, named: str) -> dict[str, Any] | None:
    """Return the subnet as EC2 describes it; None where it does not exist."""

    def read() -> dict[str, Any] | None:
        answer = answered("InvalidSubnetID.NotFound", aws.ec2.describe_subnets, SubnetIds=[named])
        return dict(answer["Subnets"][0]) if answer else None

    return aws.once(("subnet", named), read)  # type: ignore[no-any-return]


def _serves(table: Any, named: str) -> bool:
    return any(link.get("SubnetId") == named for link in table.get("Associations", []))
