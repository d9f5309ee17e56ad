"""Instances as EC2 launches them: refused for what is wrong, with every network interface of the request or template.

moto gives an instance one interface, of type `interface`, whatever a template says, and takes from the template neither
market, placement, instance profile nor version. Here an instance has all its interfaces on their cards; those of type
`efa-only` take no address of the subnet, and a targeted capacity reservation loses a place until the instance ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.elastic_network_interfaces import Attachment, NetworkInterface
from moto.ec2.models.instances import Instance, InstanceBackend
from moto.ec2.utils import random_eni_attach_id

from infra.local.additions.ec2 import images
from infra.local.additions.ec2.capacity import Reservation, release, reservations
from infra.local.additions.ec2.launch_rules import flaws
from infra.local.additions.wrapping import around

LEFT_OUT = "instances run nothing: they have a state, interfaces and tags, but no operating system"
_OF_TEMPLATE = (
    "ImageId", "InstanceType", "NetworkInterfaces", "SecurityGroupIds", "SecurityGroups", "Placement", "IamInstanceProfile",
    "InstanceMarketOptions", "CapacityReservationSpecification", "UserData", "BlockDeviceMappings", "TagSpecifications",
)  # fmt: skip


@cache
def install() -> None:
    """Put itself around the way in which moto launches, attaches interfaces and terminates."""

    @around(InstanceBackend, "run_instances")
    def _run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return _launch(original, self, *args, **kwargs)

    @around(Instance, "terminate")
    def _terminate(original: Any, self: Any) -> Any:
        before = original(self)
        release(self.ec2_backend, self.id)
        return before

    @around(Instance, "detach_eni")
    def _detach(original: Any, self: Any, eni: Any) -> None:
        # moto looks interfaces up by device index, which is unique on a card only.
        for place in [place for place, one in self.nics.items() if one is eni]:
            eni.device_index = place
        original(self, eni)

    @around(Attachment, "__init__")
    def _attached(original: Any, self: Any, eni: Any) -> None:
        original(self, eni)
        self.network_card_index = getattr(eni, "network_card_index", 0)

    @around(NetworkInterface, "__init__")
    def _made(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        kind = kwargs.pop("interface_type", None) or "interface"
        original(self, *args, **kwargs)
        self.interface_type = kind
        if kind == "efa-only":
            self.private_ip_address, self.private_ip_addresses = None, []


def template_data(backend: Any, launch_template: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the data of the launch template version that a launch names; empty when it names none."""
    if not launch_template:
        return {}
    data = backend._get_template_from_args(launch_template).data
    return {name: data[name] for name in _OF_TEMPLATE if data.get(name)}


def targeted(backend: Any, data: Mapping[str, Any], count: int) -> Reservation | None:
    """Return the reservation a launch of `count` names, with room for it; refused as EC2 does where there is none."""
    target = (data.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    wanted = target.get("CapacityReservationId")
    if not wanted:
        return None
    found = reservations(backend).get(wanted)
    if found is None:
        raise EC2ClientError(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation '{wanted}' does not exist."
        )
    market = (data.get("InstanceMarketOptions") or {}).get("MarketType")
    if (market == "capacity-block") != (found.kind == "capacity-block"):
        raise EC2ClientError(
            "InvalidParameterCombination", f"{wanted} is of type {found.kind}; the market type does not fit."
        )
    if found.instance_type != data.get("InstanceType"):
        raise EC2ClientError("InvalidParameterValue", f"{wanted} is for {found.instance_type}.")
    if found.free < count:
        raise EC2ClientError(
            "ReservationCapacityExceeded",
            f"The targeted Capacity Reservation {wanted} does not have enough available instance capacity: {found.free}.",
        )
    return found


def _launch(
    original: Any, self: Any, image_id: str, count: int, user_data: Any, security_group_names: list[str], **kwargs: Any
) -> Any:
    data = template_data(self, kwargs.get("launch_template")) | _asked(image_id, kwargs)
    subnet_id = kwargs.get("subnet_id")
    for flaw in flaws(self, data, subnet_id):
        raise EC2ClientError(flaw.code, flaw.message)
    reservation = targeted(self, data, count)
    interfaces = [dict(interface) for interface in data.get("NetworkInterfaces") or [{"DeviceIndex": 0}]]
    interfaces.sort(key=lambda one: (int(one.get("NetworkCardIndex") or 0), int(one.get("DeviceIndex") or 0)))
    primary = {**interfaces[0], "DeviceIndex": 0}
    primary.setdefault("DeleteOnTermination", True)
    _enough_addresses(self, subnet_id or primary.get("SubnetId"), interfaces, count)
    image = data.get("ImageId")
    if image and image.startswith(images.RESOLVE):
        image = images.resolved(self, image)
    kwargs["instance_type"] = data.get("InstanceType") or kwargs.get("instance_type")
    kwargs["is_instance_type_default"] = not data.get("InstanceType")
    if data.get("BlockDeviceMappings") and "block_device_mappings" not in kwargs:
        kwargs["block_device_mappings"] = [mapping for mapping in data["BlockDeviceMappings"] if "Ebs" in mapping]
    made = original(self, image, count, user_data, security_group_names, **{**kwargs, "nics": [primary]})
    for instance in made.instances:
        _complete(self, instance, data, interfaces)
        if reservation:
            reservation.used_by.add(instance.id)
            instance.capacity_reservation_id = reservation.id
    return made


def _asked(image_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request's own settings as members of a template; they override the template's."""
    asked = {
        "ImageId": image_id,
        "InstanceType": None if kwargs.get("is_instance_type_default") else kwargs.get("instance_type"),
        "NetworkInterfaces": kwargs.get("nics"),
        "SecurityGroupIds": [item for item in kwargs.get("security_group_ids") or [] if isinstance(item, str)],
    }
    return {name: value for name, value in asked.items() if value}


def _enough_addresses(backend: Any, subnet_id: str | None, interfaces: list[dict[str, Any]], count: int) -> None:
    if subnet_id is None:
        return
    subnet = backend.get_subnet(subnet_id)
    needed = count * sum(interface.get("InterfaceType") != "efa-only" for interface in interfaces)
    if needed > subnet.available_ip_address_count:
        raise EC2ClientError(
            "InsufficientFreeAddressesInSubnet",
            f"The specified subnet {subnet_id} does not have enough free addresses.",
        )


def _complete(backend: Any, one: Any, data: Mapping[str, Any], interfaces: list[dict[str, Any]]) -> None:
    """Add what moto leaves out of an instance that it has just launched."""
    first = one.nics[0]
    first.interface_type = interfaces[0].get("InterfaceType") or "interface"
    first.network_card_index = int(interfaces[0].get("NetworkCardIndex") or 0)
    for place, spec in enumerate(interfaces[1:], start=1):
        eni = backend.create_network_interface(
            spec.get("SubnetId") or one.subnet_id,
            spec.get("PrivateIpAddress"),
            device_index=int(spec.get("DeviceIndex") or 0),
            group_ids=list(spec.get("Groups") or []),
            delete_on_termination=spec.get("DeleteOnTermination", True) is True,
            description=spec.get("Description"),
            interface_type=spec.get("InterfaceType"),
        )
        eni.network_card_index = int(spec.get("NetworkCardIndex") or 0)
        eni.instance, eni.attachment_id, eni.attach_time = one, random_eni_attach_id(), first.attach_time
        eni.status = "in-use"
        one.nics[place] = eni
    one.placement.group_name = (data.get("Placement") or {}).get("GroupName") or ""
    market = (data.get("InstanceMarketOptions") or {}).get("MarketType")
    one.lifecycle = market or one.lifecycle
    profile = data.get("IamInstanceProfile") or {}
    if profile:
        backend.associate_iam_instance_profile(one.id, profile.get("Name"), profile.get("Arn"))
