"""EC2 capacity reservations, which moto lacks, and capacity blocks that somebody has bought.

Rules and error codes follow the API reference (CreateCapacityReservation) and EC2's page of error codes; where that names
none, InvalidParameterValue stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.responses import EC2Response

from infra.catalog.instances import instance
from infra.local.additions.ec2.placement import known_prefix, no_dry_run, placement_groups, put_tags, shown_tags
from infra.local.additions.lookups import new_id
from infra.local.additions.serving import Call, refuse, serve
from infra.local.additions.wrapping import filtered, kept_by

LEFT_OUT = "capacity is never short; no capacity block is sold here, the event player delivers one that was bought"


@dataclass
class Reservation:
    """An On-Demand Capacity Reservation, or a capacity block (`kind`)."""

    id: str
    arn: str
    instance_type: str
    platform: str
    zone: str
    zone_id: str
    total: int
    start: datetime
    end: datetime | None
    kind: str = "default"
    match: str = "targeted"
    state: str = "active"
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    tenancy: str = "default"
    ebs_optimized: bool = False
    ephemeral: bool = False
    placement_group_arn: str | None = None
    used_by: set[str] = field(default_factory=set)
    """Instances that run in it."""

    @property
    def free(self) -> int:
        return self.total - len(self.used_by) if self.state == "active" else 0


@cache
def install() -> None:
    """Add the actions to EC2, and the prefix of the ids so that they take tags."""
    known_prefix("capacity-reservation", "cr")
    actions = {
        "CreateCapacityReservation": _create,
        "DescribeCapacityReservations": _describe,
        "ModifyCapacityReservation": _modify,
        "CancelCapacityReservation": _cancel,
    }
    serve(EC2Response, "ec2", actions, "InvalidParameterValue")


def reservations(backend: Any) -> dict[str, Reservation]:
    """Return the reservations beside this EC2 backend of moto, by id, in the state that the clock gives them."""
    found: dict[str, Reservation] = kept_by(backend, "lustrain_reservations", dict)
    now = datetime.now(UTC)
    for item in found.values():
        if item.state == "active" and item.end and item.end <= now:
            item.state = "expired"
    return found


def zone_of(backend: Any, name: str | None, zone_id: str | None) -> Any:
    """Return the region's zone of this name or id; InvalidParameterValue when there is none."""
    zones = backend.describe_availability_zones()
    found = next((zone for zone in zones if name == zone.name or (name is None and zone_id == zone.zone_id)), None)
    if found is None:
        refuse("InvalidParameterValue", f"Invalid availability zone: [{name or zone_id}]")
    return found


def release(backend: Any, instance_id: str) -> None:
    """Note that the instance is gone; its place in a reservation is free again."""
    for reservation in reservations(backend).values():
        reservation.used_by.discard(instance_id)


def deliver_block(backend: Any, block: str, instance_type: str, count: int, zone_id: str, end: datetime) -> Reservation:
    """Add an active capacity block, as one that was bought last week in the console."""
    zone = zone_of(backend, None, zone_id)
    arn = f"arn:{backend.partition}:ec2:{backend.region_name}:{backend.account_id}:capacity-reservation/{block}"
    made = Reservation(
        id=block,
        arn=arn,
        instance_type=instance_type,
        platform="Linux/UNIX",
        zone=zone.name,
        zone_id=zone.zone_id,
        total=count,
        start=datetime.now(UTC),
        end=end,
        kind="capacity-block",
    )
    reservations(backend)[block] = made
    return made


def _create(call: Call) -> Mapping[str, Any]:
    backend = ec2_backends[call.account][call.region]
    kind, count, group_arn = call.get("InstanceType"), call.get("InstanceCount"), call.get("PlacementGroupArn")
    if instance(kind) is None:
        refuse("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
    if count < 1:
        refuse("InvalidParameterValue", f"Value ({count}) for parameter instanceCount is invalid.")
    zone = zone_of(backend, call.get("AvailabilityZone"), call.get("AvailabilityZoneId"))
    end = _end(call.get("EndDateType", "unlimited"), call.get("EndDate"))
    if group_arn and all(group.arn != group_arn for group in placement_groups(backend).values()):
        refuse("InvalidPlacementGroup.Unknown", f"The Placement Group '{group_arn}' is unknown.")
    no_dry_run(call)
    new = new_id("cr")
    made = reservations(backend)[new] = Reservation(
        id=new,
        arn=f"arn:{call.partition}:ec2:{call.region}:{call.account}:capacity-reservation/{new}",
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
    put_tags(call, "capacity-reservation", made.id)
    return {"CapacityReservation": _shown(backend, made)}


def _describe(call: Call) -> Mapping[str, Any]:
    backend = ec2_backends[call.account][call.region]
    wanted = [_known(call, item) for item in call.get("CapacityReservationIds", [])]
    shown = [_shown(backend, entry) for entry in wanted or reservations(backend).values()]
    keys = {
        "instance-type": "InstanceType",
        "state": "State",
        "availability-zone": "AvailabilityZone",
        "availability-zone-id": "AvailabilityZoneId",
        "instance-match-criteria": "InstanceMatchCriteria",
        "reservation-type": "ReservationType",
    }
    return {"CapacityReservations": filtered(shown, call.get("Filters", []), keys)}


def _modify(call: Call) -> Mapping[str, Any]:
    found = _changeable(call)
    if (count := call.get("InstanceCount")) is not None:
        if count < max(1, len(found.used_by)):
            refuse("InvalidParameterValue", f"{len(found.used_by)} instances run in {found.id}; {count} is too few.")
        found.total = count
    if (kind := call.get("EndDateType")) is not None:
        found.end = _end(kind, call.get("EndDate"))
    found.match = call.get("InstanceMatchCriteria", found.match)
    return {"Return": True}


def _cancel(call: Call) -> Mapping[str, Any]:
    found = _changeable(call)
    no_dry_run(call)
    found.state, found.end = "cancelled", datetime.now(UTC)
    return {"Return": True}


def _end(kind: str, end: Any) -> datetime | None:
    if kind == "limited" and end is None:
        refuse("MissingParameter", "The request must contain the parameter endDate")
    if kind == "unlimited" and end is not None:
        refuse("InvalidParameterCombination", "endDate cannot be specified when endDateType is unlimited.")
    moment = _moment(end)
    if moment and moment <= datetime.now(UTC):
        refuse("InvalidParameterValue", f"Value ({end}) for parameter endDate is invalid: it is in the past.")
    return moment


def _moment(value: Any) -> datetime | None:
    if value is None:
        return None
    read = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    return read if read.tzinfo else read.replace(tzinfo=UTC)


def _known(call: Call, wanted: str) -> Reservation:
    found = reservations(ec2_backends[call.account][call.region]).get(wanted)
    if found is None:
        refuse("InvalidCapacityReservationId.NotFound", f"The capacity reservation '{wanted}' does not exist.")
    return found


def _changeable(call: Call) -> Reservation:
    found = _known(call, call.get("CapacityReservationId"))
    if found.state != "active":
        refuse("InvalidCapacityReservationState", f"The capacity reservation '{found.id}' is {found.state}.")
    if found.kind == "capacity-block":
        refuse("OperationNotPermitted", f"{found.id} is a Capacity Block: it cannot be modified or cancelled.")
    return found


def _shown(backend: Any, one: Reservation) -> dict[str, Any]:
    return {
        "CapacityReservationId": one.id,
        "CapacityReservationArn": one.arn,
        "OwnerId": backend.account_id,
        "AvailabilityZone": one.zone,
        "AvailabilityZoneId": one.zone_id,
        "InstanceType": one.instance_type,
        "InstancePlatform": one.platform,
        "Tenancy": one.tenancy,
        "TotalInstanceCount": one.total,
        "AvailableInstanceCount": one.free,
        "EbsOptimized": one.ebs_optimized,
        "EphemeralStorage": one.ephemeral,
        "State": one.state,
        "CreateDate": one.created,
        "StartDate": one.start,
        "EndDate": one.end,
        "EndDateType": "limited" if one.end else "unlimited",
        "InstanceMatchCriteria": one.match,
        "PlacementGroupArn": one.placement_group_arn,
        "ReservationType": one.kind,
        "Tags": shown_tags(backend, one.id),
    }
