"""Network interfaces that FSx and EKS here put into subnets; EC2 refuses to delete a subnet or group that they use.

moto deletes a subnet or a security group even while something uses it; since https://github.com/getmoto/moto/pull/8811 it keeps
a VPC that has subnets. EC2 refuses with DependencyViolation, which is how a file system that outlives its stack keeps the
network under it: https://docs.aws.amazon.com/vpc/latest/userguide/delete-subnet.html and delete-security-group.html beside it.
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
from infra.local.patches.wrapping import around

LEFT_OUT = (
    "network interfaces: instances, FSx and EKS hold the subnets and groups under them; NAT gateways, endpoints and HyperPod "
    "nodes do not, and no rule keeps the group that it names"
)


@cache
def install() -> None:
    """Replace moto's deletion of subnets, security groups and interfaces."""
    around(SubnetBackend, "delete_subnet")(_delete_subnet)
    around(SecurityGroupBackend, "delete_security_group")(_delete_group)
    around(NetworkInterfaceBackend, "delete_network_interface")(_delete_interface)


def create_interfaces(call: Call, subnet_ids: Iterable[str], groups: Iterable[str], description: str) -> list[str]:
    """Create a service-managed interface in each subnet, in `groups` or the VPC's default group; return the ids."""
    backend = ec2_backends[call.account][call.region]
    created = [
        backend.create_network_interface(subnet_id, [], group_ids=list(groups), description=description)
        for subnet_id in subnet_ids
    ]
    for nic in created:
        nic.requester_managed, nic.requester_id, nic.status = True, "amazon-aws", "in-use"
    return [nic.id for nic in created]


def delete_interfaces(call: Call, interface_ids: Iterable[str]) -> None:
    """Delete service-managed interfaces, as the service that created them does."""
    for interface_id in interface_ids:
        ec2_backends[call.account][call.region].enis.pop(interface_id, None)


def _delete_subnet(original: Any, self: Any, subnet_id: str) -> Any:
    with LOCK:
        if any(nic.subnet.id == subnet_id for nic in _used_interfaces(self)):
            raise DependencyViolationError(f"The subnet '{subnet_id}' has dependencies and cannot be deleted.")
        return original(self, subnet_id)


def _delete_group(original: Any, self: Any, name: str | None = None, group_id: str | None = None) -> Any:
    with LOCK:
        if any(group.id == group_id for nic in _used_interfaces(self) for group in nic.group_set):
            raise DependencyViolationError(f"resource {group_id} has a dependent object")
        return original(self, name, group_id)


def _delete_interface(original: Any, self: Any, eni_id: str) -> Any:
    if any(nic.id == eni_id and nic.requester_managed for nic in _used_interfaces(self)):
        raise EC2ClientError("InvalidParameterValue", f"Network interface '{eni_id}' is currently in use.")
    return original(self, eni_id)


def _used_interfaces(backend: Any) -> list[Any]:
    """Return the interfaces in use; those of NAT gateways do not count, because moto never deletes them."""
    return [nic for nic in list(backend.enis.values()) if nic.requester_managed or _is_running(nic.instance)]


def _is_running(instance: Any) -> bool:
    return instance is not None and instance.state not in ("terminated", "shutting-down")
