"""The VPC side of EC2: zones of the region only, subnets by zone id, rule descriptions, checks of endpoints.

moto takes any region's zone for a subnet, makes the first subnet of each zone a default one that maps public addresses,
loses the description of rules between groups, and changes neither private DNS nor policy of an endpoint back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.security_groups import SecurityGroupBackend, SecurityGroupRule
from moto.ec2.models.subnets import SubnetBackend
from moto.ec2.models.vpcs import VPCBackend, VPCEndPoint
from moto.ec2.responses import EC2Response
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix

from infra.local.additions.wrapping import around

LEFT_OUT = "VPC: no packet flows; routes, gateways, endpoint policies, flow logs and prefix lists are kept, not applied"


@cache
def install() -> None:
    """Replace moto's handling of subnets, security group rules and endpoints."""
    # moto compares the id with every tag of the account by regular expression, a second for some hundred nodes.
    TaggedEC2Resource.get_tags = _get_tags  # type: ignore[method-assign]
    SecurityGroupRule.description = property(_get_description)  # type: ignore[assignment]
    around(SecurityGroupRule, "__init__")(_init_rule)
    around(SecurityGroupBackend, "modify_security_group_rules")(_modify_rules)
    around(SubnetBackend, "create_subnet")(_create_subnet)
    around(VPCBackend, "create_vpc_endpoint")(_create_endpoint)
    around(EC2Response, "modify_vpc_endpoint")(_modify_endpoint)


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


def _modify_rules(original: Any, self: Any, group_id: str, rules: Mapping[str, Mapping[str, Any]]) -> None:
    # moto requires ports even in rules for all traffic, and changes only IPv4 peers.
    for rule_id, changes in rules.items():
        _modify_rule(self, group_id, rule_id, changes)


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


def _modify_endpoint(original: Any, self: Any) -> Any:
    endpoint = self.ec2_backend.describe_vpc_endpoints(vpc_end_point_ids=[self._get_param("VpcEndpointId")])[0]
    answer = original(self)
    if (private := self._get_bool_param("PrivateDnsEnabled")) is not None:
        endpoint.private_dns_enabled = private
    if self._get_bool_param("ResetPolicy"):
        endpoint.policy_document = json.dumps(VPCEndPoint.DEFAULT_POLICY)
    return answer


def _get_tags(self: Any) -> list[dict[str, str]]:
    kind = EC2_PREFIX_TO_RESOURCE.get(get_prefix(self.id), "") if self.id else ""
    tags = self.ec2_backend.tags.get(self.id, {}).items() if self.id else ()
    return [{"resource_id": self.id, "key": key, "value": value, "resource_type": kind} for key, value in tags]


def _get_description(self: Any) -> str | None:
    return self.ip_range.get("Description") or getattr(self, "peer_description", None)


def _modify_rule(backend: Any, group_id: str, rule_id: str, changes: Mapping[str, Any]) -> None:
    group = backend.get_security_group_by_name_or_id(group_id)
    rule = group.get_rule(rule_id) if group else None
    if rule is None:
        raise EC2ClientError(
            "InvalidSecurityGroupRuleId.NotFound", f"The security group rule ID '{rule_id}' does not exist"
        )
    peers = {
        "CidrIpv4": "CidrIp",
        "CidrIpv6": "CidrIpv6",
        "ReferencedGroupId": "GroupId",
        "PrefixListId": "PrefixListId",
    }
    requested_peers = [name for name in peers if changes.get(name)]
    if len(requested_peers) != 1:
        raise EC2ClientError(
            "InvalidParameterCombination" if requested_peers else "MissingParameter",
            "The request must contain exactly one of: cidrIp, cidrIpv6, prefixListId, or referencedGroupId",
        )
    kind, protocol = peers[requested_peers[0]], str(changes.get("IpProtocol"))
    peer = {
        **rule.ip_range,
        **rule.source_group,
        **({"PrefixListId": rule.prefix_list_id} if rule.prefix_list_id else {}),
    }
    if kind not in peer:
        raise EC2ClientError("InvalidParameterValue", f"Invalid rule type for security group rule '{rule_id}'.")
    if protocol in ("tcp", "udp") and (changes.get("FromPort") is None or changes.get("ToPort") is None):
        raise EC2ClientError(
            "InvalidParameterValue", "Invalid value for portRange. Must specify both from and to ports with TCP/UDP."
        )
    rule.ip_protocol = protocol
    rule.from_port, rule.to_port = (
        (None, None) if protocol == "-1" else (changes.get("FromPort"), changes.get("ToPort"))
    )
    if kind.startswith("Cidr"):
        rule.ip_range = {kind: changes[requested_peers[0]]}
    elif kind == "GroupId":
        rule.source_group = {**rule.source_group, "GroupId": changes[requested_peers[0]]}
    else:
        rule.prefix_list_id = changes[requested_peers[0]]
    rule.peer_description = changes.get("Description")


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
    vpc, service = backend.get_vpc(parameters["vpc_id"]), parameters["service_name"]
    kind = parameters.get("endpoint_type") or "Gateway"
    for group in parameters.get("security_group_ids") or []:
        if backend.get_security_group_from_id(group) is None:
            raise EC2ClientError("InvalidGroup.NotFound", f"The security group '{group}' does not exist")
    for table in parameters.get("route_table_ids") or []:
        backend.get_route_table(table)
    existing = [
        endpoint
        for endpoint in backend.vpc_end_points.values()
        if (endpoint.vpc_id, endpoint.service_name, endpoint.vpc_endpoint_type) == (vpc.id, service, kind)
        and endpoint.state != "deleted"
    ]
    if kind == "Gateway" and {t for endpoint in existing for t in endpoint.route_table_ids} & set(
        parameters.get("route_table_ids") or ()
    ):
        raise EC2ClientError("RouteAlreadyExists", f"A route table has a route to {service} already.")
    if kind != "Interface" or not parameters.get("private_dns_enabled"):
        return
    if not (vpc.enable_dns_support and vpc.enable_dns_hostnames):
        raise EC2ClientError(
            "InvalidParameter",
            "Enabling private DNS requires both enableDnsSupport and enableDnsHostnames VPC attributes set to true for "
            f"{vpc.id}",
        )
    if any(endpoint.private_dns_enabled for endpoint in existing):
        raise EC2ClientError(
            "InvalidParameter",
            f"private-dns-enabled cannot be set because there is already a conflicting DNS domain for {service}",
        )
