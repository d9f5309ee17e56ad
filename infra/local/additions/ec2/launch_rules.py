"""The checks that EC2 runs on a launch: which members go together, and whether what they name is there.

RunInstances and CreateAutoScalingGroup refuse a flaw. What depends on the instance type is not among them: plan and preflight
take cards, slots and markets from `infra.catalog.instances`, and tests/infra/test_plan_nics.py holds the layout of every type
against EC2's laws. Codes and words follow EC2's error code page and messages that users reported, e.g.
https://github.com/eksctl-io/eksctl/issues/7520; where neither names a code, it is InvalidParameterCombination or
InvalidParameterValue.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moto.ec2.exceptions import InvalidSubnetIdError
from moto.iam.models import iam_backends

from infra.local.additions.ec2 import images
from infra.local.additions.ec2.placement import placement_groups

MOST_USER_DATA = 16 * 1024
"""https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html: bytes, before encoding."""


@dataclass(frozen=True)
class Flaw:
    """A reason to refuse a launch, in the service's words."""

    code: str
    message: str


def find_flaws(backend: Any, data: Mapping[str, Any], subnet_id: str | None = None) -> list[Flaw]:
    """Return the reasons why EC2 refuses to launch `data` (members of RequestLaunchTemplateData) into `subnet_id`."""
    flaws: list[Flaw] = []
    interfaces = data.get("NetworkInterfaces") or []
    flaws += _interface_flaws(interfaces, data)
    flaws += _placement_flaws(backend, data)
    flaws += _reference_flaws(backend, interfaces, data, subnet_id)
    flaws += _profile_flaws(backend, data.get("IamInstanceProfile") or {})
    flaws += _image_flaws(backend, data.get("ImageId"))
    return flaws


def _interface_flaws(interfaces: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Iterator[Flaw]:
    """Yield flaws of the interfaces that do not depend on the instance type."""
    if interfaces and (data.get("SecurityGroupIds") or data.get("SecurityGroups")):
        yield _invalid_combination(
            "Network interfaces and an instance-level security groups may not be specified on the same request"
        )
    if len(interfaces) > 1 and any(nic.get("AssociatePublicIpAddress") for nic in interfaces):
        yield _invalid_combination(
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network interfaces."
        )
    shared_slots = [slot for slot, times in Counter(map(_slot_of, interfaces)).items() if times > 1]
    if shared_slots:
        card, device = shared_slots[0]
        yield _invalid_value(
            f"Each network interface requires a unique device index; {device} is used twice on network card {card}."
        )
    for nic in interfaces:
        kind = nic.get("InterfaceType") or "interface"
        if kind not in ("interface", "efa", "efa-only"):
            yield _invalid_value(f"Value ({kind}) for parameter interfaceType is invalid.")
        if kind == "efa-only" and (nic.get("AssociatePublicIpAddress") or nic.get("PrivateIpAddress")):
            yield _invalid_combination("An efa-only network interface has no IP address.")


def _placement_flaws(backend: Any, data: Mapping[str, Any]) -> Iterator[Flaw]:
    market = (data.get("InstanceMarketOptions") or {}).get("MarketType")
    target = (data.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    name = (data.get("Placement") or {}).get("GroupName")
    if market == "capacity-block" and not target.get("CapacityReservationId"):
        yield _invalid_combination("A capacity-block launch must target a capacity reservation id.")
    if market == "spot" and target:
        yield _invalid_combination("A capacity reservation cannot be targeted by a Spot request.")
    if name and name not in placement_groups(backend):
        yield Flaw("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    if name and market == "capacity-block":
        yield _invalid_combination("A placement group cannot be specified for a Capacity Block launch.")


def _reference_flaws(
    backend: Any, interfaces: Sequence[Mapping[str, Any]], data: Mapping[str, Any], subnet_id: str | None
) -> Iterator[Flaw]:
    """Yield subnets and security groups that do not exist or are in different VPCs."""
    vpcs: dict[str, str] = {}
    for named_subnet in dict.fromkeys(filter(None, [subnet_id, *(nic.get("SubnetId") for nic in interfaces)])):
        try:
            vpcs[named_subnet] = backend.get_subnet(named_subnet).vpc_id
        except InvalidSubnetIdError:
            yield Flaw("InvalidSubnetID.NotFound", f"The subnet ID '{named_subnet}' does not exist")
    groups = [
        *(data.get("SecurityGroupIds") or ()),
        *(name for nic in interfaces for name in nic.get("Groups") or ()),
    ]
    for group_id in dict.fromkeys(groups):
        group = backend.get_security_group_from_id(group_id)
        if group is None:
            yield Flaw("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        elif foreign_subnets := [subnet for subnet, vpc in vpcs.items() if vpc != group.vpc_id]:
            yield Flaw(
                "InvalidParameter",
                f"Security group {group_id} and subnet {foreign_subnets[0]} belong to different networks.",
            )


def _profile_flaws(backend: Any, profile: Mapping[str, Any]) -> Iterator[Flaw]:
    profiles = iam_backends[backend.account_id][backend.partition].instance_profiles.values()
    if (arn := profile.get("Arn")) and all(existing.arn != arn for existing in profiles):
        yield _invalid_value(
            f"Value ({arn}) for parameter iamInstanceProfile.arn is invalid. Invalid IAM Instance Profile ARN"
        )
    if (name := profile.get("Name")) and all(existing.name != name for existing in profiles):
        yield _invalid_value(
            f"Value ({name}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
        )


def _image_flaws(backend: Any, image: str | None) -> Iterator[Flaw]:
    if not image:
        return
    if image.startswith(images.RESOLVE):
        if images.resolve_image(backend, image) is None:
            name = image.removeprefix(images.RESOLVE)
            yield _invalid_value(f"The SSM parameter {name} does not exist.")
    elif not re.fullmatch(r"ami-[0-9a-f]{8,17}", image):
        yield Flaw("InvalidAMIID.Malformed", f'Invalid id: "{image}" (expecting "ami-...")')


def _slot_of(nic: Mapping[str, Any]) -> tuple[int, int]:
    return int(nic.get("NetworkCardIndex") or 0), int(nic.get("DeviceIndex") or 0)


def _invalid_value(message: str) -> Flaw:
    return Flaw("InvalidParameterValue", message)


def _invalid_combination(message: str) -> Flaw:
    return Flaw("InvalidParameterCombination", message)
