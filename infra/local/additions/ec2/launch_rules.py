"""The checks that EC2 makes of a launch: of a template, of RunInstances, or of both together.

EC2 takes a template with such flaws and only warns (member `Warning` of CreateLaunchTemplate); RunInstances and
CreateAutoScalingGroup refuse it. Codes and words follow EC2's error code page and messages that users reported, e.g.
https://github.com/eksctl-io/eksctl/issues/7520 and https://github.com/dstackai/dstack/issues/2872; where neither tells,
the code is InvalidParameterCombination or InvalidParameterValue.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moto.ec2.exceptions import InvalidSubnetIdError
from moto.iam.models import iam_backends

from infra.catalog.instances import Instance, instance
from infra.local.additions.ec2 import images
from infra.local.additions.ec2.placement import placement_groups

MOST_USER_DATA = 16 * 1024
"""https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/user-data.html: bytes, before encoding."""


@dataclass(frozen=True)
class Flaw:
    """One reason to refuse, as the service words it."""

    code: str
    message: str


def flaws(backend: Any, data: Mapping[str, Any], subnet_id: str | None = None) -> list[Flaw]:
    """Return the faults EC2 refuses in `data` (members as in RequestLaunchTemplateData) when launching into `subnet_id`."""
    found: list[Flaw] = []
    facts = instance(data.get("InstanceType") or "")
    if facts is None and data.get("InstanceType"):
        found.append(_value(f"Invalid value '{data['InstanceType']}' for InstanceType."))
    interfaces = data.get("NetworkInterfaces") or []
    found += _interfaces(interfaces, data)
    if facts:
        found += _cards(interfaces, facts)
        found += _market(data, facts)
        found += _placement(backend, data, facts)
    found += _references(backend, interfaces, data, subnet_id)
    found += _profile(backend, data.get("IamInstanceProfile") or {})
    found += _image(backend, data.get("ImageId"))
    return found


def _interfaces(interfaces: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Iterator[Flaw]:
    """Yield what is wrong whatever the instance type."""
    if interfaces and (data.get("SecurityGroupIds") or data.get("SecurityGroups")):
        yield _together(
            "Network interfaces and an instance-level security groups may not be specified on the same request"
        )
    if len(interfaces) > 1 and any(one.get("AssociatePublicIpAddress") for one in interfaces):
        yield _together(
            "The associatePublicIPAddress parameter cannot be specified when launching with multiple network interfaces."
        )
    twice = [slot for slot, times in Counter(map(_slot, interfaces)).items() if times > 1]
    if twice:
        card, device = twice[0]
        yield _value(
            f"Each network interface requires a unique device index; {device} is used twice on network card {card}."
        )
    for one in interfaces:
        kind = one.get("InterfaceType") or "interface"
        if kind not in ("interface", "efa", "efa-only"):
            yield _value(f"Value ({kind}) for parameter interfaceType is invalid.")
        if kind == "efa-only" and (one.get("AssociatePublicIpAddress") or one.get("PrivateIpAddress")):
            yield _together("An efa-only network interface has no IP address.")


def _cards(interfaces: Sequence[Mapping[str, Any]], facts: Instance) -> Iterator[Flaw]:
    """Yield what the instance type's network cards do not take."""
    if not interfaces:
        return
    cards = {card.index: card for card in facts.cards}
    primary = next((one for one in interfaces if _slot(one) == (facts.primary_card, 0)), None)
    if primary is None:
        yield _value(f"The primary network interface must be at device index 0 of network card {facts.primary_card}.")
    elif primary.get("InterfaceType") == "efa-only":
        yield _together("An efa-only network interface cannot be the primary network interface.")
    efa = [one for one in interfaces if (one.get("InterfaceType") or "").startswith("efa")]
    if efa and not facts.efa:
        yield _together(f"{facts.name} instances do not support Elastic Fabric Adapters.")
    elif len(efa) > facts.efa:
        yield Flaw("AttachmentLimitExceeded", f"EFA interface count {len(efa)} exceeds the limit for {facts.name}")
    for index, count in Counter(_slot(one)[0] for one in interfaces).items():
        if index not in cards:
            yield _value(f"The network card index {index} is not valid for {facts.name}, which has {len(cards)}.")
        elif count > cards[index].slots:
            yield Flaw("AttachmentLimitExceeded", f"Interface count {count} exceeds the limit for {facts.name}")
    for one in interfaces:
        index, device = _slot(one)
        card, kind = cards.get(index), one.get("InterfaceType") or "interface"
        if card and device >= card.slots:
            yield _value(
                f"The specified number '{device}' for the device index exceeds the maximum number of network interfaces "
                f"supported by the network card at network card index {index}. The maximum devices for this network card "
                f"is {card.slots}. Specify a number from 0 to {card.slots - 1}, and try again."
            )
        if card and facts.efa and kind in ("efa", "efa-only") and kind not in card.kinds:
            yield _together(f"The network card at index {index} of {facts.name} does not support the type {kind}.")


def _market(data: Mapping[str, Any], facts: Instance) -> Iterator[Flaw]:
    market = (data.get("InstanceMarketOptions") or {}).get("MarketType")
    target = (data.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    if market in ("spot", "capacity-block") and market not in facts.usage:
        yield Flaw(
            "UnsupportedOperation", f"The instance type '{facts.name}' does not support the market type {market}."
        )
    if market == "capacity-block" and not target.get("CapacityReservationId"):
        yield _together("A capacity-block launch must target a capacity reservation id.")
    if market == "spot" and target:
        yield _together("A capacity reservation cannot be targeted by a Spot request.")


def _placement(backend: Any, data: Mapping[str, Any], facts: Instance) -> Iterator[Flaw]:
    name = (data.get("Placement") or {}).get("GroupName")
    if not name:
        return
    group = placement_groups(backend).get(name)
    if group is None:
        yield Flaw("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
        return
    if group.strategy not in facts.placement:
        yield _together(
            f"{group.strategy.capitalize()} placement groups are not supported by the '{facts.name}' instance type. "
            "Specify a supported instance type or change the placement group strategy, and try again."
        )
    if (data.get("InstanceMarketOptions") or {}).get("MarketType") == "capacity-block":
        yield _together("A placement group cannot be specified for a Capacity Block launch.")


def _references(
    backend: Any, interfaces: Sequence[Mapping[str, Any]], data: Mapping[str, Any], subnet_id: str | None
) -> Iterator[Flaw]:
    """Subnets and security groups that are not there, or not in the same VPC."""
    vpcs: dict[str, str] = {}
    for wanted in dict.fromkeys(filter(None, [subnet_id, *(one.get("SubnetId") for one in interfaces)])):
        try:
            vpcs[wanted] = backend.get_subnet(wanted).vpc_id
        except InvalidSubnetIdError:
            yield Flaw("InvalidSubnetID.NotFound", f"The subnet ID '{wanted}' does not exist")
    groups = [*(data.get("SecurityGroupIds") or ()), *(name for one in interfaces for name in one.get("Groups") or ())]
    for wanted in dict.fromkeys(groups):
        group = backend.get_security_group_from_id(wanted)
        if group is None:
            yield Flaw("InvalidGroup.NotFound", f"The security group '{wanted}' does not exist")
        elif strange := [subnet for subnet, vpc in vpcs.items() if vpc != group.vpc_id]:
            yield Flaw(
                "InvalidParameter", f"Security group {wanted} and subnet {strange[0]} belong to different networks."
            )


def _profile(backend: Any, profile: Mapping[str, Any]) -> Iterator[Flaw]:
    known = iam_backends[backend.account_id][backend.partition].instance_profiles.values()
    if (arn := profile.get("Arn")) and all(one.arn != arn for one in known):
        yield _value(f"Value ({arn}) for parameter iamInstanceProfile.arn is invalid. Invalid IAM Instance Profile ARN")
    if (name := profile.get("Name")) and all(one.name != name for one in known):
        yield _value(
            f"Value ({name}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
        )


def _image(backend: Any, image: str | None) -> Iterator[Flaw]:
    if not image:
        return
    if image.startswith(images.RESOLVE):
        if images.resolved(backend, image) is None:
            name = image.removeprefix(images.RESOLVE)
            yield _value(f"The SSM parameter {name} does not exist.")
    elif not re.fullmatch(r"ami-[0-9a-f]{8,17}", image):
        yield Flaw("InvalidAMIID.Malformed", f'Invalid id: "{image}" (expecting "ami-...")')


def _slot(interface: Mapping[str, Any]) -> tuple[int, int]:
    return int(interface.get("NetworkCardIndex") or 0), int(interface.get("DeviceIndex") or 0)


def _value(message: str) -> Flaw:
    return Flaw("InvalidParameterValue", message)


def _together(message: str) -> Flaw:
    return Flaw("InvalidParameterCombination", message)
