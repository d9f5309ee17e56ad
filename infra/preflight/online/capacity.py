"""CAP 1xx: reservations, blocks and training plans as they are, and how spot is doing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from infra.aws import Aws, answered
from infra.config import ClusterSpec, Group
from infra.finding import Problems, finding
from infra.plan.nodes.capacity import BLOCK_MARGIN
from infra.plan.summary import machines
from infra.preflight.online.answers import missing
from infra.preflight.rule import Context, Family, group_types, groups, listed
from infra.prices_online import spot_rows

RESERVATION = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CapacityReservation.html"
DESCRIBE = "ec2:DescribeCapacityReservations"
PLAN = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingPlan.html"
PRICES = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-instances-history.html"
SCORES = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/how-sps-works.html"
DAYS = 7
WILD = 2.0
"""A spot price that varied by this factor within DAYS is a zone that is running out; ours."""
POOR_SCORE = 3
"""Of 10; AWS calls 10 likely and 1 very unlikely, the line between is ours (SCORES)."""
FEW_TYPES = 3
"""With fewer types "the returned placement score will always be low": only zones are then compared
(https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetSpotPlacementScores.html)."""
SOON = timedelta(minutes=1)
TO_COME = ("scheduled", "pending", "payment-pending", "assessing", "delayed", "unassigned")
"""States of a reservation that is still to begin (RESERVATION)."""
GIVES_UP = timedelta(hours=20)
"""A little less than the day after which Auto Scaling suspends a group that nothing was launched for
(https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-suspend-resume-processes.html)."""
NO_PLAN = ("ResourceNotFound", "ValidationException")
RULES = Family()


@RULES.add("CAP-101", "A reservation or block exists and is active.", RESERVATION, permission=DESCRIBE)
def reservation_state(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group, there in _reservations(spec, aws):
        here = f"{path}.reservation"
        if there is None:
            yield missing(here, str(group.capacity.reservation), "correct it, or have it shared with the account")
        elif (problem := _other_start(group, there, context.now)) is not None:
            yield finding(f"{path}.starts_at", problem, "set what AWS says: the group is filled at that time")
        elif there["State"] in TO_COME:
            if group.capacity.starts_at:
                continue
            message = f"is {there['State']}: no machine comes before {there.get('StartDate', 'its start')}"
            yield finding(here, message, "wait for its start", level="warning")
        elif there["State"] != "active":
            yield finding(here, f"is {there['State']}", "use other capacity")


def _other_start(group: Group, there: Mapping[str, Any], now: datetime | None) -> str | None:
    """Return what is wrong with `starts_at` of a block, where AWS tells its start."""
    starts = there.get("StartDate")
    if group.capacity.mode != "capacity-block" or not isinstance(starts, datetime):
        return None
    given = group.capacity.starts_at
    if given is None:
        if there["State"] not in TO_COME or (now is not None and starts <= now + GIVES_UP):
            return None
        return f"the block begins {starts.isoformat()}: a group that wants its nodes before gives up after about a day"
    return None if abs(given - starts) <= SOON else f"is {given.isoformat()}, AWS says {starts.isoformat()}"


@RULES.add(
    "CAP-102",
    "A reservation or block is in the cluster's zone, of the group's type, for Linux, and of its mode's kind.",
    RESERVATION,
    permission=DESCRIBE,
)
def reservation_place(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group, there in _reservations(spec, aws):
        if there is None:
            continue
        here, zone = f"{path}.reservation", there.get("AvailabilityZoneId")
        if zone and zone != (mine := spec.zone_of(group)):
            whose = "group" if group.zone_id else "cluster"
            yield finding(here, f"lies in {zone}, the {whose} in {mine}", f"set zone_id: {zone}")
        if there["InstanceType"] != group.ec2_type:
            message = f"is for {there['InstanceType']}, the group is of {group.ec2_type}"
            yield finding(here, message, "make them equal")
        if "Linux" not in there.get("InstancePlatform", "Linux"):
            yield finding(here, f"is for {there['InstancePlatform']}", "use one for Linux/UNIX")
        block = there.get("ReservationType") == "capacity-block"
        if block != (group.capacity.mode == "capacity-block"):
            kind = "capacity-block" if block else "reservation"
            yield finding(f"{path}.mode", f"what is named is a {kind}", f"set mode: {kind}")
        yield from _placement(path, group, there.get("PlacementGroupArn", "").rpartition("/")[2])


def _placement(path: str, group: Group, made_in: str) -> Problems:
    if made_in != (group.capacity.placement_group or ""):
        message = f"the reservation was made in {made_in or 'no placement group'}"
        fix = f"set placement_group: {made_in}" if made_in else "remove placement_group"
        yield finding(f"{path}.placement_group", message, fix)


@RULES.add(
    "CAP-103",
    "A reservation or block holds enough machines, and enough of them are free.",
    RESERVATION,
    permission=DESCRIBE,
)
def reservation_size(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group, there in _reservations(spec, aws):
        if there is None:
            continue
        sharing = [entry for entry in spec.groups if entry.capacity.reservation == group.capacity.reservation]
        wanted, total = sum(item.count for item in sharing), there.get("TotalInstanceCount", 0)
        free = there.get("AvailableInstanceCount", total)
        if wanted > total:
            message = f"holds {total}, {listed(one.name for one in sharing)} want {wanted}"
            yield finding(f"{path}.reservation", message, "lower count, or enlarge it")
        elif wanted > free:
            message = f"{free} of {total} are free, {wanted} are wanted: right if this cluster has the others"
            yield finding(f"{path}.reservation", message, "end what else runs in it", level="warning")


@RULES.add(
    "CAP-104",
    "A reservation or block ends when the spec says, and not before the job.",
    RESERVATION,
    permission=DESCRIBE,
)
def reservation_end(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group, there in _reservations(spec, aws):
        ends = there.get("EndDate") if there else None
        if ends is not None:
            yield from _ends(path, spec, group, ends)


@RULES.add(
    "CAP-105",
    "A training plan is active, for HyperPod, in the cluster's zone, of the group's type, large and long enough.",
    PLAN,
    permission="sagemaker:DescribeTrainingPlan",
)
def training_plan(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group in groups(spec):
        if not (spec.hyperpod and group.capacity.training_plan):
            continue
        here = f"{path}.capacity"
        name = group.capacity.training_plan.rpartition("/")[2]
        plan = answered(NO_PLAN, aws.sagemaker.describe_training_plan, TrainingPlanName=name)
        if plan is None:
            message = f"training plan {name} does not exist in this account and region"
            yield finding(f"{here}.training_plan", message, "correct the ARN")
        else:
            yield from _compare(here, spec, group, dict(plan))


def _compare(path: str, spec: ClusterSpec, group: Group, plan: dict[str, Any]) -> Problems:
    here = f"{path}.training_plan"
    if plan["Status"] in ("Pending", "Scheduled"):
        message = f"is {plan['Status']}: no machine comes before {plan.get('StartTime', 'its start')}"
        yield finding(here, message, "wait for its start", level="warning")
    elif plan["Status"] != "Active":
        yield finding(here, f"is {plan['Status']}", "use other capacity")
    if plan.get("TargetResources") and "hyperpod-cluster" not in plan["TargetResources"]:
        yield finding(here, f"is for {listed(plan['TargetResources'])}", "use a plan for hyperpod-cluster")
    parts = plan.get("ReservedCapacitySummaries", [])
    zones = {entry["AvailabilityZoneId"] for entry in parts if entry.get("AvailabilityZoneId")}
    if zones and spec.zone_of(group) not in zones:
        yield finding(here, f"lies in {listed(sorted(zones))}", f"set zone_id: {sorted(zones)[0]}")
    types = {part["InstanceType"] for part in parts if part.get("InstanceType")}
    if types and group.hyperpod_type not in types:
        yield finding(here, f"is for {listed(sorted(types))}, not {group.hyperpod_type}", "make them equal")
    total = plan.get("TotalInstanceCount")
    sharing = [each for each in spec.groups if each.capacity.training_plan == group.capacity.training_plan]
    if total is not None and sum(item.count for item in sharing) > total:
        message = f"holds {total}, {listed(one.name for one in sharing)} want {sum(one.count for one in sharing)}"
        yield finding(here, message, "lower count")
    if plan.get("EndTime"):
        yield from _ends(path, spec, group, plan["EndTime"])


@RULES.add(
    "CAP-106",
    f"Spot had a price in the zone in the last {DAYS} days, and a steady one.",
    PRICES,
    level="warning",
    permission="ec2:DescribeSpotPriceHistory",
)
def spot_prices(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    spot = [kind for kind in group_types(spec) if kind.facts and kind.group.capacity.mode == "spot"]
    if not spot:
        return
    types, since = sorted({kind.group.ec2_type for kind in spot}), datetime.now(UTC) - timedelta(days=DAYS)
    prices: dict[tuple[str, str], list[float]] = defaultdict(list)
    for zone in sorted({spec.zone_of(kind.group) for kind in spot}):
        for row in spot_rows(aws, types, since, zone_id=zone):
            prices[zone, row["InstanceType"]].append(float(row["SpotPrice"]))
    for kind in spot:
        group, zone = kind.group, spec.zone_of(kind.group)
        here = f"{kind.path}.capacity.mode" if kind.key.endswith(".instance_type") else kind.key
        found = prices[zone, group.ec2_type]
        if not found:
            message = f"{group.ec2_type} had no spot price in {zone} for {DAYS} days: it is not sold there"
            yield finding(here, message, "take another zone or mode")
        elif max(found) > WILD * min(found):
            message = f"the price went from {min(found):g} to {max(found):g} USD an hour within {DAYS} days"
            yield finding(here, message, "expect interruptions, or take another zone")


@RULES.add(
    "CAP-107",
    "AWS thinks it likely that the group comes on spot in this zone; of one or two types, no less likely than in another.",
    SCORES,
    level="warning",
    permission="ec2:GetSpotPlacementScores",
)
def spot_score(spec: ClusterSpec, context: Context, aws: Aws) -> Problems:
    for path, group in groups(spec):
        if group.capacity.mode != "spot" or not group.count:
            continue
        pages = aws.ec2.get_paginator("get_spot_placement_scores").paginate(
            InstanceTypes=list(group.ec2_types),
            TargetCapacity=group.count - min(group.capacity.on_demand_base, group.count - 1),
            SingleAvailabilityZone=True,
            RegionNames=[aws.region],
        )
        scores = {item["AvailabilityZoneId"]: item["Score"] for page in pages for item in page["SpotPlacementScores"]}
        zone = spec.zone_of(group)
        score = scores.get(zone, 0)
        few = len(group.ec2_types) < FEW_TYPES
        best = max(scores, key=lambda one: scores[one], default="")
        better = best and scores[best] > (score if few else max(score, POOR_SCORE))
        if score <= POOR_SCORE and (better or not few):
            low = ", which is low for any one or two types" if few else ""
            message = f"{machines(group)} in {zone} have a score of {score} of 10{low}"
            fix = f"{best} has {scores[best]}" if better else "take fewer, another type, or a reservation"
            yield finding(f"{path}.capacity.mode", message, fix)


def _reservations(spec: ClusterSpec, aws: Aws) -> Iterator[tuple[str, Group, dict[str, Any] | None]]:
    """Path of the capacity, group, and what EC2 says of its reservation (None: not there) for each group that names one."""
    for path, group in groups(spec):
        if spec.backend == "ec2" and group.capacity.reservation:
            yield f"{path}.capacity", group, _reservation(aws, group.capacity.reservation)


def _reservation(aws: Aws, named: str) -> dict[str, Any] | None:
    def read() -> dict[str, Any] | None:
        absent, describe = "InvalidCapacityReservationId.NotFound", aws.ec2.describe_capacity_reservations
        answer = answered(absent, describe, CapacityReservationIds=[named])
        return dict(answer["CapacityReservations"][0]) if answer and answer["CapacityReservations"] else None

    return aws.once(("reservation", named), read)  # type: ignore[no-any-return]


def _ends(path: str, spec: ClusterSpec, group: Group, ends: datetime) -> Problems:
    given = group.capacity.ends_at
    if given and abs(given - ends) > SOON:
        message = f"{given.isoformat()}, but AWS says {ends.isoformat()}"
        yield finding(f"{path}.ends_at", message, "set what AWS says: the trainer stops by it")
    if given is None and spec.job_ends_at and spec.job_ends_at > ends - BLOCK_MARGIN:
        message = f"nodes are to be empty by {(ends - BLOCK_MARGIN).isoformat()}, before job_ends_at"
        yield finding(f"{path}.ends_at", message, "extend the capacity, or end the job earlier")
