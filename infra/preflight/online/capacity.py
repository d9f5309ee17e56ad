"""CAP 1xx: reservations, blocks and training plans as they are, and how spot is doing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError

from infra.config import ClusterSpec, Group
from infra.plan.nodes.capacity import BLOCK_MARGIN
from infra.preflight.finding import Finding
from infra.preflight.online.asking import Aws, OnlineRule, code_of
from infra.preflight.rule import Context, groups, known_groups, listed

RESERVATION = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CapacityReservation.html"
PLAN = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingPlan.html"
PRICES = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-instances-history.html"
SCORES = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/how-sps-works.html"
DAYS = 7
WILD = 2.0
"""A spot price that varied by this factor within DAYS is a zone that is running out; ours."""
POOR_SCORE = 3
"""Of 10; AWS calls 10 likely and 1 very unlikely, the line between is ours (SCORES)."""
SOON = timedelta(minutes=1)


class _ReservationRule(OnlineRule):
    source = RESERVATION
    permission = "ec2:DescribeCapacityReservations"

    def look(self, spec: ClusterSpec, context: Context, aws: Aws) -> Iterable[Finding]:
        for path, group in groups(spec):
            if spec.backend == "ec2" and group.capacity.reservation:
                there = _reservation(aws, group.capacity.reservation)
                yield from self.compare(f"{path}.capacity", spec, group, there)

    def compare(self, path: str, spec: ClusterSpec, group: Group, there: dict[str, Any] | None) -> Iterator[Finding]:
        raise NotImplementedError


class ReservationState(_ReservationRule):
    code = "CAP-101"
    checks = "A reservation or block is there and active."

    def compare(self, path: str, spec: ClusterSpec, group: Group, there: dict[str, Any] | None) -> Iterator[Finding]:
        here = f"{path}.reservation"
        if there is None:
            message = f"{group.capacity.reservation} is not in this account and region"
            yield self.finding(here, message, "correct it, or have it shared with the account")
        elif there["State"] in ("scheduled", "pending", "payment-pending", "assessing", "delayed", "unassigned"):
            message = f"is {there['State']}: no machine comes before {there.get('StartDate', 'its start')}"
            yield self.finding(here, message, "wait for its start", level="warning")
        elif there["State"] != "active":
            yield self.finding(here, f"is {there['State']}", "use other capacity")


class ReservationPlace(_ReservationRule):
    code = "CAP-102"
    checks = "A reservation or block is in the cluster's zone, of the group's type, for Linux, and of its mode's kind."

    def compare(self, path: str, spec: ClusterSpec, group: Group, there: dict[str, Any] | None) -> Iterator[Finding]:
        if there is None:
            return
        here, zone = f"{path}.reservation", there.get("AvailabilityZoneId")
        if zone and zone != (mine := spec.zone_of(group)):
            whose = "group" if group.zone_id else "cluster"
            yield self.finding(here, f"lies in {zone}, the {whose} in {mine}", f"set zone_id: {zone}")
        if there["InstanceType"] != group.ec2_type:
            message = f"is for {there['InstanceType']}, the group is of {group.ec2_type}"
            yield self.finding(here, message, "make them equal")
        if "Linux" not in there.get("InstancePlatform", "Linux"):
            yield self.finding(here, f"is for {there['InstancePlatform']}", "use one for Linux/UNIX")
        block = there.get("ReservationType") == "capacity-block"
        if block != (group.capacity.mode == "capacity-block"):
            kind = "capacity-block" if block else "reservation"
            yield self.finding(f"{path}.mode", f"what is named is a {kind}", f"set mode: {kind}")
        yield from self._placement(path, group, there.get("PlacementGroupArn", "").rpartition("/")[2])

    def _placement(self, path: str, group: Group, made_in: str) -> Iterator[Finding]:
        if made_in != (group.capacity.placement_group or ""):
            message = f"the reservation was made in {made_in or 'no placement group'}"
            fix = f"set placement_group: {made_in}" if made_in else "remove placement_group"
            yield self.finding(f"{path}.placement_group", message, fix)


class ReservationSize(_ReservationRule):
    code = "CAP-103"
    checks = "A reservation or block holds enough machines, and enough of them are free."

    def compare(self, path: str, spec: ClusterSpec, group: Group, there: dict[str, Any] | None) -> Iterator[Finding]:
        if there is None:
            return
        sharing = [one for one in spec.groups if one.capacity.reservation == group.capacity.reservation]
        wanted, total = sum(one.count for one in sharing), there.get("TotalInstanceCount", 0)
        free = there.get("AvailableInstanceCount", total)
        if wanted > total:
            message = f"holds {total}, {listed(one.name for one in sharing)} want {wanted}"
            yield self.finding(f"{path}.reservation", message, "lower count, or enlarge it")
        elif wanted > free:
            message = f"{free} of {total} are free, {wanted} are wanted: right if this cluster has the others"
            yield self.finding(f"{path}.reservation", message, "end what else runs in it", level="warning")


class ReservationEnd(_ReservationRule):
    code = "CAP-104"
    checks = "A reservation or block ends when the spec says, and not before the job."

    def compare(self, path: str, spec: ClusterSpec, group: Group, there: dict[str, Any] | None) -> Iterator[Finding]:
        ends = there.get("EndDate") if there else None
        if ends is not None:
            yield from _ends(self, path, spec, group, ends)


class TrainingPlan(OnlineRule):
    code = "CAP-105"
    checks = (
        "A training plan is active, for HyperPod, in the cluster's zone, of the group's type, large and long enough."
    )
    source = PLAN
    permission = "sagemaker:DescribeTrainingPlan"

    def look(self, spec: ClusterSpec, context: Context, aws: Aws) -> Iterable[Finding]:
        for path, group in groups(spec):
            if not (spec.hyperpod and group.capacity.training_plan):
                continue
            here = f"{path}.capacity"
            name = group.capacity.training_plan.rpartition("/")[2]
            try:
                plan = aws.sagemaker.describe_training_plan(TrainingPlanName=name)
            except ClientError as error:
                if code_of(error) not in ("ResourceNotFound", "ResourceNotFoundException", "ValidationException"):
                    raise
                message = f"there is no training plan {name} in this account and region"
                yield self.finding(f"{here}.training_plan", message, "correct the ARN")
                continue
            yield from self._compare(here, spec, group, dict(plan))

    def _compare(self, path: str, spec: ClusterSpec, group: Group, plan: dict[str, Any]) -> Iterator[Finding]:
        here = f"{path}.training_plan"
        if plan["Status"] in ("Pending", "Scheduled"):
            message = f"is {plan['Status']}: no machine comes before {plan.get('StartTime', 'its start')}"
            yield self.finding(here, message, "wait for its start", level="warning")
        elif plan["Status"] != "Active":
            yield self.finding(here, f"is {plan['Status']}", "use other capacity")
        if plan.get("TargetResources") and "hyperpod-cluster" not in plan["TargetResources"]:
            yield self.finding(here, f"is for {listed(plan['TargetResources'])}", "use a plan for hyperpod-cluster")
        parts = plan.get("ReservedCapacitySummaries", [])
        zones = {one["AvailabilityZoneId"] for one in parts if one.get("AvailabilityZoneId")}
        if zones and spec.zone_of(group) not in zones:
            yield self.finding(here, f"lies in {listed(sorted(zones))}", f"set zone_id: {sorted(zones)[0]}")
        types = {one["InstanceType"] for one in parts if one.get("InstanceType")}
        if types and group.hyperpod_type not in types:
            yield self.finding(here, f"is for {listed(sorted(types))}, not {group.hyperpod_type}", "make them equal")
        total = plan.get("TotalInstanceCount")
        sharing = [one for one in spec.groups if one.capacity.training_plan == group.capacity.training_plan]
        if total is not None and sum(one.count for one in sharing) > total:
            message = f"holds {total}, {listed(one.name for one in sharing)} want {sum(one.count for one in sharing)}"
            yield self.finding(here, message, "lower count")
        if plan.get("EndTime"):
            yield from _ends(self, path, spec, group, plan["EndTime"])


class SpotPrices(OnlineRule):
    code = "CAP-106"
    level = "warning"
    checks = f"Spot had a price in the zone in the last {DAYS} days, and a steady one."
    source = PRICES
    permission = "ec2:DescribeSpotPriceHistory"

    def look(self, spec: ClusterSpec, context: Context, aws: Aws) -> Iterable[Finding]:
        spot = [(path, group) for path, group, _ in known_groups(spec) if group.capacity.mode == "spot"]
        if not spot:
            return
        types: list[Any] = sorted({group.ec2_type for _, group in spot})
        prices: dict[tuple[str, str], list[float]] = defaultdict(list)
        for zone in sorted({spec.zone_of(group) for _, group in spot}):
            pages = aws.ec2.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=types,
                ProductDescriptions=["Linux/UNIX"],
                AvailabilityZoneId=zone,
                StartTime=datetime.now(UTC) - timedelta(days=DAYS),
            )
            for one in (one for page in pages for one in page["SpotPriceHistory"]):
                prices[zone, one["InstanceType"]].append(float(one["SpotPrice"]))
        for path, group in spot:
            zone = spec.zone_of(group)
            found = prices[zone, group.ec2_type]
            if not found:
                message = f"{group.ec2_type} had no spot price in {zone} for {DAYS} days: it is not sold there"
                yield self.finding(f"{path}.capacity.mode", message, "take another zone or mode")
            elif max(found) > WILD * min(found):
                message = f"the price went from {min(found):g} to {max(found):g} USD an hour within {DAYS} days"
                yield self.finding(f"{path}.capacity.mode", message, "expect interruptions, or take another zone")


class SpotScore(OnlineRule):
    code = "CAP-107"
    level = "warning"
    checks = "AWS thinks it likely that the gang comes on spot in this zone."
    source = SCORES
    permission = "ec2:GetSpotPlacementScores"

    def look(self, spec: ClusterSpec, context: Context, aws: Aws) -> Iterable[Finding]:
        for path, group in groups(spec):
            if group.capacity.mode != "spot" or not group.count:
                continue
            answer = aws.ec2.get_spot_placement_scores(
                InstanceTypes=[group.ec2_type],
                TargetCapacity=group.count,
                SingleAvailabilityZone=True,
                RegionNames=[aws.region],
            )
            scores = {one["AvailabilityZoneId"]: one["Score"] for one in answer["SpotPlacementScores"]}
            zone = spec.zone_of(group)
            score = scores.get(zone, 0)
            if score <= POOR_SCORE:
                best = max(scores, key=lambda one: scores[one], default="")
                message = f"{group.count} x {group.ec2_type} in {zone} have a score of {score} of 10"
                better = best and scores[best] > max(score, POOR_SCORE)
                fix = f"{best} has {scores[best]}" if better else "take fewer, another type, or a reservation"
                yield self.finding(f"{path}.capacity.mode", message, fix)


def _reservation(aws: Aws, named: str) -> dict[str, Any] | None:
    def ask() -> dict[str, Any] | None:
        try:
            found = aws.ec2.describe_capacity_reservations(CapacityReservationIds=[named])["CapacityReservations"]
        except ClientError as error:
            if code_of(error) == "InvalidCapacityReservationId.NotFound":
                return None
            raise
        return dict(found[0]) if found else None

    return aws.once(("reservation", named), ask)  # type: ignore[no-any-return]


def _ends(rule: OnlineRule, path: str, spec: ClusterSpec, group: Group, ends: datetime) -> Iterator[Finding]:
    told = group.capacity.ends_at
    if told and abs(told - ends) > SOON:
        message = f"{told.isoformat()}, but AWS says {ends.isoformat()}"
        yield rule.finding(f"{path}.ends_at", message, "set what AWS says: the trainer stops by it")
    if told is None and spec.job_ends_at and spec.job_ends_at > ends - BLOCK_MARGIN:
        message = f"nodes are to be empty by {(ends - BLOCK_MARGIN).isoformat()}, before job_ends_at"
        yield rule.finding(f"{path}.ends_at", message, "extend the capacity, or end the job earlier")


RULES = (
    ReservationState(),
    ReservationPlace(),
    ReservationSize(),
    ReservationEnd(),
    TrainingPlan(),
    SpotPrices(),
    SpotScore(),
)
