"""Lookups across emulated services: subnets, security groups, buckets, keys, roles."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from moto.ec2.exceptions import InvalidSubnetIdError
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.kms.models import kms_backends
from moto.s3.models import s3_backends

from infra.local.additions.serving import Call

LEFT_OUT = "between services: each sees every resource of the account, whatever its role may do"


@dataclass(frozen=True)
class Permission:
    """A rule of a security group; `protocol` "-1" is all traffic, and then the ports are None."""

    protocol: str
    first_port: int | None
    last_port: int | None
    group: str | None
    cidr: str | None

    def covers(self, protocol: str, port: int) -> bool:
        if self.protocol == "-1":
            return True
        ports = range(self.first_port or 0, (self.last_port or 0) + 1)
        return self.protocol == protocol and port in ports


@dataclass(frozen=True)
class SecurityGroup:
    id: str
    vpc: str | None
    ingress: tuple[Permission, ...]
    egress: tuple[Permission, ...]

    @property
    def open_to_itself(self) -> bool:
        """Whether members may send each other all traffic in both directions, which EFA requires."""
        return all(
            any(rule.protocol == "-1" and rule.group == self.id for rule in side)
            for side in (self.ingress, self.egress)
        )


def new_id(prefix: str) -> str:
    """Return an id in the long form, such as fs-0123456789abcdef0."""
    return f"{prefix}-0{secrets.token_hex(8)}"


def find_subnet(call: Call, subnet_id: str) -> Any | None:
    """Return moto's subnet (`.vpc_id`, `.availability_zone_id`), None when the region has no such subnet."""
    try:
        return ec2_backends[call.account][call.region].get_subnet(subnet_id)
    except InvalidSubnetIdError:
        return None


def find_security_group(call: Call, group_id: str) -> SecurityGroup | None:
    security_group = ec2_backends[call.account][call.region].get_security_group_from_id(group_id)
    if security_group is None:
        return None
    return SecurityGroup(
        security_group.id,
        security_group.vpc_id,
        _permissions(security_group.ingress_rules),
        _permissions(security_group.egress_rules),
    )


def find_vpc(
    call: Call, subnet_ids: Iterable[str], group_ids: Iterable[str], reject: Callable[..., NoReturn]
) -> tuple[str, list[Any]]:
    """Return the VPC that these subnets and security groups share, and moto's subnets; otherwise call `reject` with a message
    and the id."""
    by_id = {subnet_id: find_subnet(call, subnet_id) for subnet_id in subnet_ids}
    for subnet_id, subnet in by_id.items():
        if subnet is None:
            reject(f"The subnet ID '{subnet_id}' does not exist", InvalidSubnetId=subnet_id)
    subnets = [subnet for subnet in by_id.values() if subnet is not None]
    vpcs = {str(subnet.vpc_id) for subnet in subnets}
    if len(vpcs) != 1:
        reject("Subnets specified must belong to the same VPC")
    (vpc,) = vpcs
    for group_id in group_ids:
        security_group = find_security_group(call, group_id)
        if security_group is None or security_group.vpc != vpc:
            reject(f"The security group ID '{group_id}' does not exist in VPC '{vpc}'", InvalidSecurityGroupId=group_id)
    return vpc, subnets


def bucket_region(call: Call, name: str) -> str | None:
    """Return the region of a bucket, None when the account has no bucket of this name."""
    bucket = s3_backends[call.account][call.partition].buckets.get(name)
    return None if bucket is None else str(bucket.region_name)


def object_exists(call: Call, bucket: str, key: str) -> bool:
    fake_bucket = s3_backends[call.account][call.partition].buckets.get(bucket)
    return fake_bucket is not None and key in fake_bucket.keys


def is_key_usable(call: Call, key: str) -> bool:
    """Whether a KMS key of the account, named by id, ARN or alias, exists and is enabled."""
    backend = kms_backends[call.account][call.region]
    name = backend.get_alias_name(key)
    key_id = backend.get_key_id_from_alias(name) if name.startswith("alias/") else backend.get_key_id(name)
    kms_key = backend.keys.get(key_id) if key_id else None
    return kms_key is not None and bool(kms_key.enabled)


def role_trusts(call: Call, arn: str, service: str) -> bool:
    """Whether a role of the account exists and its trust policy lets `service` assume it."""
    roles = iam_backends[call.account][call.partition].roles.values()
    return any(role.arn == arn and f'"{service}"' in (role.assume_role_policy_document or "") for role in roles)


def _permissions(rules: Iterable[Any]) -> tuple[Permission, ...]:
    return tuple(
        Permission(
            str(rule.ip_protocol),
            rule.from_port,
            rule.to_port,
            rule.source_group.get("GroupId") or None,
            rule.cidr_ipv4 or rule.cidr_ipv6,
        )
        for rule in rules
    )
