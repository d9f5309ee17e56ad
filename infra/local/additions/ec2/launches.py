"""Instance launches as EC2 runs them: flawed requests are refused, and all network interfaces are created.

moto gives an instance one interface of type `interface`, whatever the template contains, and ignores the template's market,
placement and instance profile: https://github.com/getmoto/moto/pull/9858 takes its type, groups, key and user data. Here an
instance gets all its interfaces on their cards; interfaces of type `efa-only` take no address of the subnet, and a targeted
capacity reservation loses a place until the instance ends.
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
from infra.local.additions.ec2.capacity import Reservation, release_capacity, reservations
from infra.local.additions.ec2.launch_rules import find_flaws
from infra.local.patches.wrapping import around

LEFT_OUT = "instances run nothing: they have a state, interfaces and tags, but no operating system"
_TEMPLATE_MEMBERS = (
    "ImageId", "InstanceType", "NetworkInterfaces", "SecurityGroupIds", "SecurityGroups", "Placement", "IamInstanceProfile",
    "InstanceMarketOptions", "CapacityReservationSpecification", "UserData", "BlockDeviceMappings", "TagSpecifications",
)  # fmt: skip


@cache
def install() -> None:
    """Replace moto's launches, attachments of interfaces and terminations."""

    @around(InstanceBackend, "run_instances")
    def _run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return _launch(original, self, *args, **kwargs)

    @around(Instance, "terminate")
    def _terminate(original: Any, self: Any) -> Any:
        previous_state = original(self)
        release_capacity(self.ec2_backend, self.id)
        return previous_state

    @around(Instance, "detach_eni")
    def _detach(original: Any, self: Any, eni: Any) -> None:
        # moto looks interfaces up by device index, which is unique on a card only.
        for index in [index for index, nic in self.nics.items() if nic is eni]:
            eni.device_index = index
        original(self, eni)

    @around(Attachment, "__init__")
    def _init_attachment(original: Any, self: Any, eni: Any) -> None:
        original(self, eni)
        self.network_card_index = getattr(eni, "network_card_index", 0)

    @around(NetworkInterface, "__init__")
    def _init_interface(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
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
    return {name: data[name] for name in _TEMPLATE_MEMBERS if data.get(name)}


def find_target_reservation(backend: Any, data: Mapping[str, Any], count: int) -> Reservation | None:
    """Return the reservation that a launch of `count` instances targets, if any; refuse one that EC2 would refuse."""
    target = (data.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    reservation_id = target.get("CapacityReservationId")
    if not reservation_id:
        return None
    reservation = reservations(backend).get(reservation_id)
    if reservation is None:
        raise EC2ClientError(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation '{reservation_id}' does not exist."
        )
    if reservation.instance_type != data.get("InstanceType"):
        raise EC2ClientError("InvalidParameterValue", f"{reservation_id} is for {reservation.instance_type}.")
    if reservation.free < count:
        raise EC2ClientError(
            "ReservationCapacityExceeded",
            f"The targeted Capacity Reservation {reservation_id} does not have enough available instance capacity: "
            f"{reservation.free}.",
        )
    return reservation


def _launch(
    original: Any, self: Any, image_id: str, count: int, user_data: Any, security_group_names: list[str], **kwargs: Any
) -> Any:
    data = template_data(self, kwargs.get("launch_template")) | _launch_members(image_id, kwargs)
    subnet_id = kwargs.get("subnet_id")
    for flaw in find_flaws(self, data, subnet_id):
        raise EC2ClientError(flaw.code, flaw.message)
    reservation = find_target_reservation(self, data, count)
    interfaces = [dict(nic) for nic in data.get("NetworkInterfaces") or [{"DeviceIndex": 0}]]
    interfaces.sort(key=lambda nic: (int(nic.get("NetworkCardIndex") or 0), int(nic.get("DeviceIndex") or 0)))
    primary = {**interfaces[0], "DeviceIndex": 0}
    primary.setdefault("DeleteOnTermination", True)
    _check_free_addresses(self, subnet_id or primary.get("SubnetId"), interfaces, count)
    image = data.get("ImageId")
    if image and image.startswith(images.RESOLVE):
        image = images.resolve_image(self, image)
    kwargs["instance_type"] = data.get("InstanceType") or kwargs.get("instance_type")
    kwargs["is_instance_type_default"] = not data.get("InstanceType")
    if data.get("BlockDeviceMappings") and "block_device_mappings" not in kwargs:
        kwargs["block_device_mappings"] = [mapping for mapping in data["BlockDeviceMappings"] if "Ebs" in mapping]
    launched = original(self, image, count, user_data, security_group_names, **{**kwargs, "nics": [primary]})
    for instance in launched.instances:
        _complete_instance(self, instance, data, interfaces)
        if reservation:
            reservation.used_by.add(instance.id)
            instance.capacity_reservation_id = reservation.id
    return launched


def _launch_members(image_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the request as template members; they override the template's."""
    market = kwargs.get("lifecycle")
    members = {
        "ImageId": image_id,
        "InstanceMarketOptions": {"MarketType": market} if market else None,
        "InstanceType": None if kwargs.get("is_instance_type_default") else kwargs.get("instance_type"),
        "NetworkInterfaces": kwargs.get("nics"),
        "SecurityGroupIds": [item for item in kwargs.get("security_group_ids") or [] if isinstance(item, str)],
    }
    return {name: value for name, value in members.items() if value}


def _check_free_addresses(backend: Any, subnet_id: str | None, interfaces: list[dict[str, Any]], count: int) -> None:
    if subnet_id is None:
        return
    subnet = backend.get_subnet(subnet_id)
    needed = count * sum(nic.get("InterfaceType") != "efa-only" for nic in interfaces)
    if needed > subnet.available_ip_address_count:
        raise EC2ClientError(
            "InsufficientFreeAddressesInSubnet",
            f"The specified subnet {subnet_id} does not have enough free addresses.",
        )


def _complete_instance(backend: Any, instance: Any, data: Mapping[str, Any], interfaces: list[dict[str, Any]]) -> None:
    """Add the interfaces, placement, market and profile that moto leaves out of a new instance."""
    primary = instance.nics[0]
    primary.interface_type = interfaces[0].get("InterfaceType") or "interface"
    primary.network_card_index = int(interfaces[0].get("NetworkCardIndex") or 0)
    for index, request in enumerate(interfaces[1:], start=1):
        eni = backend.create_network_interface(
            request.get("SubnetId") or instance.subnet_id,
            request.get("PrivateIpAddress"),
            device_index=int(request.get("DeviceIndex") or 0),
            group_ids=list(request.get("Groups") or []),
            delete_on_termination=request.get("DeleteOnTermination", True) is True,
            description=request.get("Description"),
            interface_type=request.get("InterfaceType"),
        )
        eni.network_card_index = int(request.get("NetworkCardIndex") or 0)
        eni.instance, eni.attachment_id, eni.attach_time = instance, random_eni_attach_id(), primary.attach_time
        eni.status = "in-use"
        instance.nics[index] = eni
    instance.placement.group_name = (data.get("Placement") or {}).get("GroupName") or ""
    market = (data.get("InstanceMarketOptions") or {}).get("MarketType")
    instance.lifecycle = market or instance.lifecycle
    profile = data.get("IamInstanceProfile") or {}
    if profile:
        backend.associate_iam_instance_profile(instance.id, profile.get("Name"), profile.get("Arn"))
