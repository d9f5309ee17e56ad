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
    """One rule of a security group; `protocol` "-1" is all traffic, then the ports are None."""

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
class Group:
    id: str
    vpc: str | None
    ingress: tuple[Permission, ...]
    egress: tuple[Permission, ...]

    @property
    def open_to_itself(self) -> bool:
        """All traffic in from and out to members of the group itself, what EFA asks for."""
        return all(
            any(rule.protocol == "-1" and rule.group == self.id for rule in side)
            for side in (self.ingress, self.egress)
        )


def new_id(prefix: str) -> str:
    """Return an id in the long form, such as fs-0123456789abcdef0."""
    return f"{prefix}-0{secrets.token_hex(8)}"


def subnet(call: Call, subnet_id: str) -> Any | None:
    """moto's subnet (`.vpc_id`, `.availability_zone_id`), None where there is none of this id in the region."""
    try:
        return ec2_backends[call.account][call.region].get_subnet(subnet_id)
    except InvalidSubnetIdError:
        return None


def group(call: Call, group_id: str) -> Group | None:
    found = ec2_backends[call.account][call.region].get_security_group_from_id(group_id)
    if found is None:
        return None
    return Group(found.id, found.vpc_id, _permissions(found.ingress_rules), _permissions(found.egress_rules))


def vpc_of(
    call: Call, subnet_ids: Iterable[str], group_ids: Iterable[str], wrong: Callable[..., NoReturn]
) -> tuple[str, list[Any]]:
    """Return the one VPC of these subnets and security groups, and moto's subnets; `wrong` refuses with a message and the
    id."""
    found = {item: subnet(call, item) for item in subnet_ids}
    for one, there in found.items():
        if there is None:
            wrong(f"The subnet ID '{one}' does not exist", InvalidSubnetId=one)
    subnets = [there for there in found.values() if there is not None]
    vpcs = {str(there.vpc_id) for there in subnets}
    if len(vpcs) != 1:
        wrong("Subnets specified must belong to the same VPC")
    (vpc,) = vpcs
    for entry in group_ids:
        known = group(call, entry)
        if known is None or known.vpc != vpc:
            wrong(f"The security group ID '{entry}' does not exist in VPC '{vpc}'", InvalidSecurityGroupId=entry)
    return vpc, subnets


def bucket_region(call: Call, name: str) -> str | None:
    """Return the region a bucket lives in, None where the account has no bucket of this name."""
    found = s3_backends[call.account][call.partition].buckets.get(name)
    return None if found is None else str(found.region_name)


def object_exists(call: Call, bucket: str, key: str) -> bool:
    found = s3_backends[call.account][call.partition].buckets.get(bucket)
    return found is not None and key in found.keys


def key_usable(call: Call, key: str) -> bool:
    """Whether a KMS key of the account, named by id, ARN or alias, is there and enabled."""
    backend = kms_backends[call.account][call.region]
    name = backend.get_alias_name(key)
    id_ = backend.get_key_id_from_alias(name) if name.startswith("alias/") else backend.get_key_id(name)
    found = backend.keys.get(id_) if id_ else None
    return found is not None and bool(found.enabled)


def role_trusts(call: Call, arn: str, service: str) -> bool:
    """Whether a role of the account exists and names `service` among those that may assume it."""
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
