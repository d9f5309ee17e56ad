"""Network interfaces that services put into a customer's subnets; EC2 deletes nothing that they use.

moto deletes a subnet or a security group whatever lies in it. EC2 refuses with DependencyViolation, which is how a file
system that outlives its stack keeps the network under it:
https://docs.aws.amazon.com/vpc/latest/userguide/delete-subnet.html and delete-security-group.html beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from moto.ec2.exceptions import DependencyViolationError, EC2ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.elastic_network_interfaces import NetworkInterfaceBackend
from moto.ec2.models.security_groups import SecurityGroupBackend
from moto.ec2.models.subnets import SubnetBackend

from infra.local.additions.serving import LOCK, Call
from infra.local.additions.wrapping import around

LEFT_OUT = (
    "network interfaces: instances, FSx and EKS hold the subnets and groups under them; NAT gateways, endpoints and HyperPod "
    "nodes do not, and no rule keeps the group that it names"
)


@cache
def install() -> None:
    """Put itself around the deletion of subnets, security groups and interfaces."""
    around(SubnetBackend, "delete_subnet")(_delete_subnet)
    around(SecurityGroupBackend, "delete_security_group")(_delete_group)
    around(NetworkInterfaceBackend, "delete_network_interface")(_delete_interface)


def put(call: Call, subnet_ids: Iterable[str], groups: Iterable[str], description: str) -> list[str]:
    """Add a service's own interface in each of the subnets, in these groups or the VPC's default one; their ids."""
    backend = ec2_backends[call.account][call.region]
    made = [
        backend.create_network_interface(one, [], group_ids=list(groups), description=description) for one in subnet_ids
    ]
    for one in made:
        one.requester_managed, one.requester_id, one.status = True, "amazon-aws", "in-use"
    return [one.id for one in made]


def take(call: Call, ids: Iterable[str]) -> None:
    """Remove interfaces, as the service that put them there does."""
    for one in ids:
        ec2_backends[call.account][call.region].enis.pop(one, None)


def _delete_subnet(original: Any, self: Any, subnet_id: str) -> Any:
    with LOCK:
        if any(one.subnet.id == subnet_id for one in _used(self)):
            raise DependencyViolationError(f"The subnet '{subnet_id}' has dependencies and cannot be deleted.")
        return original(self, subnet_id)


def _delete_group(original: Any, self: Any, name: str | None = None, group_id: str | None = None) -> Any:
    with LOCK:
        if any(group.id == group_id for one in _used(self) for group in one.group_set):
            raise DependencyViolationError(f"resource {group_id} has a dependent object")
        return original(self, name, group_id)


def _delete_interface(original: Any, self: Any, eni_id: str) -> Any:
    if any(one.id == eni_id and one.requester_managed for one in _used(self)):
        raise EC2ClientError("InvalidParameterValue", f"Network interface '{eni_id}' is currently in use.")
    return original(self, eni_id)


def _used(backend: Any) -> list[Any]:
    """Interfaces that somebody uses; moto forgets none of those of its NAT gateways, which must hold nothing."""
    return [one for one in list(backend.enis.values()) if one.requester_managed or _runs(one.instance)]


def _runs(instance: Any) -> bool:
    return instance is not None and instance.state not in ("terminated", "shutting-down")
