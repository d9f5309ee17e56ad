"""EC2's On-Demand Capacity Reservations, which moto lacks.

Rules and error codes follow the API reference (CreateCapacityReservation) and EC2's page of error codes; where that page
names no code, the error is InvalidParameterValue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.responses import EC2Response

from infra.local.additions.ec2.placement import placement_groups, put_tags, register_id_prefix, tag_list
from infra.local.additions.lookups import new_id
from infra.local.additions.serving import Call, refuse, serve
from infra.local.patches.wrapping import get_or_create

LEFT_OUT = "capacity is never short; there are no capacity blocks: a group that targets one has no instances"


@dataclass
class Reservation:
    id: str
    arn: str
    instance_type: str
    platform: str
    zone: str
    zone_id: str
    total: int
    start: datetime
    end: datetime | None
    match: str = "targeted"
    state: str = "active"
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    tenancy: str = "default"
    ebs_optimized: bool = False
    ephemeral: bool = False
    placement_group_arn: str | None = None
    used_by: set[str] = field(default_factory=set)
    """Ids of the instances that run in the reservation."""

    @property
    def free(self) -> int:
        return self.total - len(self.used_by) if self.state == "active" else 0


@cache
def install() -> None:
    """Add the actions to EC2 and register the id prefix, so that reservations take tags."""
    register_id_prefix("capacity-reservation", "cr")
    actions = {
        "CreateCapacityReservation": _create,
        "DescribeCapacityReservations": _describe,
        "ModifyCapacityReservation": _modify,
        "CancelCapacityReservation": _cancel,
    }
    serve(EC2Response, "ec2", actions, "InvalidParameterValue")


def reservations(backend: Any) -> dict[str, Reservation]:
    """Return the reservations of this EC2 backend by id; those whose end has passed are expired."""
    by_id: dict[str, Reservation] = get_or_create(backend, "lustrain_reservations", dict)
    now = datetime.now(UTC)
    for reservation in by_id.values():
        if reservation.state == "active" and reservation.end and reservation.end <= now:
            reservation.state = "expired"
    return by_id


def find_zone(backend: Any, name: str | None, zone_id: str | None) -> Any:
    """Return the region's zone of this name or id; InvalidParameterValue when there is none."""
    zones = backend.describe_availability_zones()
    zone = next(
        (candidate for candidate in zones if name == candidate.name or (name is None and zone_id == candidate.zone_id)),
        None,
    )
    if zone is None:
        refuse("InvalidParameterValue", f"Invalid availability zone: [{name or zone_id}]")
    return zone


def release_capacity(backend: Any, instance_id: str) -> None:
    """Free the place that a terminated instance held in its reservation."""
    for reservation in reservations(backend).values():
        reservation.used_by.discard(instance_id)


def _create(call: Call) -> Mapping[str, Any]:
    backend = ec2_backends[call.account][call.region]
    kind, count, group_arn = call.get("InstanceType"), call.get("InstanceCount"), call.get("PlacementGroupArn")
    zone = find_zone(backend, call.get("AvailabilityZone"), call.get("AvailabilityZoneId"))
    end = _parse_end(call.get("EndDateType", "unlimited"), call.get("EndDate"))
    if group_arn and all(group.arn != group_arn for group in placement_groups(backend).values()):
        refuse("InvalidPlacementGroup.Unknown", f"The Placement Group '{group_arn}' is unknown.")
    reservation_id = new_id("cr")
    reservation = reservations(backend)[reservation_id] = Reservation(
        id=reservation_id,
        arn=f"arn:{call.partition}:ec2:{call.region}:{call.account}:capacity-reservation/{reservation_id}",
        instance_type=kind,
        platform=call.get("InstancePlatform"),
        zone=zone.name,
        zone_id=zone.zone_id,
        total=count,
        start=datetime.now(UTC),
        end=end,
        match=call.get("InstanceMatchCriteria", "open"),
        tenancy=call.get("Tenancy", "default"),
        ebs_optimized=call.get("EbsOptimized", False),
        ephemeral=call.get("EphemeralStorage", False),
        placement_group_arn=group_arn,
    )
    put_tags(call, "capacity-reservation", reservation.id)
    return {"CapacityReservation": _describe_reservation(backend, reservation)}


def _describe(call: Call) -> Mapping[str, Any]:
    backend = ec2_backends[call.account][call.region]
    selected = [_get_reservation(call, reservation_id) for reservation_id in call.get("CapacityReservationIds", [])]
    descriptions = [
        _describe_reservation(backend, reservation) for reservation in selected or reservations(backend).values()
    ]
    return {"CapacityReservations": descriptions}


def _modify(call: Call) -> Mapping[str, Any]:
    reservation = _get_modifiable_reservation(call)
    if (count := call.get("InstanceCount")) is not None:
        if count < max(1, len(reservation.used_by)):
            refuse(
                "InvalidParameterValue",
                f"{len(reservation.used_by)} instances run in {reservation.id}; {count} is too few.",
            )
        reservation.total = count
    if (kind := call.get("EndDateType")) is not None:
        reservation.end = _parse_end(kind, call.get("EndDate"))
    reservation.match = call.get("InstanceMatchCriteria", reservation.match)
    return {"Return": True}


def _cancel(call: Call) -> Mapping[str, Any]:
    reservation = _get_modifiable_reservation(call)
    reservation.state, reservation.end = "cancelled", datetime.now(UTC)
    return {"Return": True}


def _parse_end(kind: str, end: Any) -> datetime | None:
    if (kind == "limited") != (end is not None):
        refuse("InvalidParameterCombination", "endDate is required when endDateType is limited, and only then.")
    if end is None:
        return None
    end_time = end if isinstance(end, datetime) else datetime.fromisoformat(str(end).replace("Z", "+00:00"))
    return end_time if end_time.tzinfo else end_time.replace(tzinfo=UTC)


def _get_reservation(call: Call, reservation_id: str) -> Reservation:
    reservation = reservations(ec2_backends[call.account][call.region]).get(reservation_id)
    if reservation is None:
        refuse("InvalidCapacityReservationId.NotFound", f"The capacity reservation '{reservation_id}' does not exist.")
    return reservation


def _get_modifiable_reservation(call: Call) -> Reservation:
    reservation = _get_reservation(call, call.get("CapacityReservationId"))
    if reservation.state != "active":
        refuse(
            "InvalidCapacityReservationState", f"The capacity reservation '{reservation.id}' is {reservation.state}."
        )
    return reservation


def _describe_reservation(backend: Any, reservation: Reservation) -> dict[str, Any]:
    return {
        "CapacityReservationId": reservation.id,
        "CapacityReservationArn": reservation.arn,
        "OwnerId": backend.account_id,
        "AvailabilityZone": reservation.zone,
        "AvailabilityZoneId": reservation.zone_id,
        "InstanceType": reservation.instance_type,
        "InstancePlatform": reservation.platform,
        "Tenancy": reservation.tenancy,
        "TotalInstanceCount": reservation.total,
        "AvailableInstanceCount": reservation.free,
        "EbsOptimized": reservation.ebs_optimized,
        "EphemeralStorage": reservation.ephemeral,
        "State": reservation.state,
        "CreateDate": reservation.created,
        "StartDate": reservation.start,
        "EndDate": reservation.end,
        "EndDateType": "limited" if reservation.end else "unlimited",
        "InstanceMatchCriteria": reservation.match,
        "PlacementGroupArn": reservation.placement_group_arn,
        "ReservationType": "default",
        "Tags": tag_list(backend, reservation.id),
    }
