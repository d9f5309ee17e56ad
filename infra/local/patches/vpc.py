"""The VPC side of EC2: zones of the region only, subnets by zone id, rule descriptions, checks of endpoints.

moto takes any region's zone for a subnet, makes the first subnet of each zone a default one that maps public addresses, loses
the description of rules between groups, and gives an endpoint neither DNS options nor a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.ec2.models.subnets import SubnetBackend
from moto.ec2.models.vpcs import VPCBackend
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix

from infra.local.patches.wrapping import around

LEFT_OUT = (
    "VPC: no packet flows; routes, gateways, endpoint policies, flow logs and prefix lists are kept, not applied; security "
    "groups' rules and endpoints change as moto lets them"
)


@cache
def install() -> None:
    """Replace moto's handling of subnets, security group rules and endpoints."""
    # moto compares the id with every tag of the account by regular expression, a second for some hundred nodes.
    TaggedEC2Resource.get_tags = _get_tags  # type: ignore[method-assign]
    SecurityGroupRule.description = property(_get_description)  # type: ignore[assignment]
    around(SecurityGroupRule, "__init__")(_init_rule)
    around(SubnetBackend, "create_subnet")(_create_subnet)
    around(VPCBackend, "create_vpc_endpoint")(_create_endpoint)


def _init_rule(
    original: Any, self: Any, ec2_backend: Any, ip_protocol: Any, group_id: Any, from_port: Any, to_port: Any,
    ip_range: Any, source_group: Any = None, prefix_list_id: Any = None, *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    # Two rules with the same peer are the same rule, even when their descriptions differ.
    peer = {name: value for name, value in (source_group or {}).items() if name != "Description"}
    original(
        self,
        ec2_backend,
        ip_protocol,
        group_id,
        from_port,
        to_port,
        ip_range,
        peer,
        prefix_list_id,
        *args,
        **kwargs,
    )
    self.peer_description = (source_group or {}).get("Description") or (prefix_list_id or {}).get("Description")


def _create_subnet(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    names = ("vpc_id", "cidr_block", "ipv6_cidr_block", "availability_zone", "availability_zone_id")
    parameters = {**dict(zip(names, args, strict=False)), **kwargs}
    parameters["availability_zone"] = _find_zone_name(
        self, parameters.get("availability_zone"), parameters.pop("availability_zone_id", None)
    )
    subnet = original(self, **parameters, **({"ipv6_native": args[5]} if len(args) > 5 else {}))
    if not self.get_vpc(subnet.vpc_id).is_default:
        subnet.default_for_az = subnet.map_public_ip_on_launch = False
    return subnet


def _create_endpoint(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    _check_endpoint(self, kwargs)
    endpoint = original(self, *args, **kwargs)
    endpoint.dns_options, endpoint.ip_address_type = {"DnsRecordIpType": "ipv4"}, "ipv4"
    if endpoint.vpc_endpoint_type == "Interface" and not endpoint.security_group_ids:
        default = self.get_default_security_group(endpoint.vpc_id)
        endpoint.security_group_ids = [default.id] if default else []
    endpoint.private_dns_enabled = endpoint.vpc_endpoint_type == "Interface" and bool(endpoint.private_dns_enabled)
    return endpoint


def _get_tags(self: Any) -> list[dict[str, str]]:
    kind = EC2_PREFIX_TO_RESOURCE.get(get_prefix(self.id), "") if self.id else ""
    tags = self.ec2_backend.tags.get(self.id, {}).items() if self.id else ()
    return [{"resource_id": self.id, "key": key, "value": value, "resource_type": kind} for key, value in tags]


def _get_description(self: Any) -> str | None:
    return self.ip_range.get("Description") or getattr(self, "peer_description", None)


def _find_zone_name(backend: Any, name: str | None, zone_id: str | None) -> str:
    """Return the zone's name; refuse a zone that the region does not have."""
    zones = backend.describe_availability_zones()
    for zone in zones:
        if name == zone.name or (name is None and zone_id in (zone.zone_id, None)):
            return str(zone.name)
    parameter, value = ("availabilityZone", name) if name else ("availabilityZoneId", zone_id)
    known = ", ".join(zone.name if name else zone.zone_id for zone in zones)
    raise EC2ClientError(
        "InvalidParameterValue",
        f"Value ({value}) for parameter {parameter} is invalid. "
        f"Subnets can currently only be created in the following availability zones: {known}.",
    )


def _check_endpoint(backend: Any, parameters: Mapping[str, Any]) -> None:
    vpc = backend.get_vpc(parameters["vpc_id"])
    for table in parameters.get("route_table_ids") or []:
        backend.get_route_table(table)
    if parameters.get("private_dns_enabled") and not (vpc.enable_dns_support and vpc.enable_dns_hostnames):
        raise EC2ClientError(
            "InvalidParameter",
            "Enabling private DNS requires both enableDnsSupport and enableDnsHostnames VPC attributes set to true for "
            f"{vpc.id}",
        )
