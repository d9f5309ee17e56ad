"""Where a group's machines come from, in EC2's terms: market, reservation, placement group, and own reservations.

A cluster placement group and a reservation exclude each other: EC2 then looks for the reserved machines inside the group,
where they do not lie, and answers InsufficientInstanceCapacity (https://github.com/aws/aws-parallelcluster/issues/4215,
https://github.com/eksctl-io/eksctl/issues/8220). Only a reservation that was made in a group is launched into that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from infra.catalog.instances import Instance
from infra.config import Backend, Capacity, CapacityMode, ClusterSpec, Group
from infra.finding import finding
from lustrain.problem import Problem

MarketType = Literal["spot", "capacity-block"]

PLATFORM = "Linux/UNIX"
SAVE_SECONDS = 300
"""How long a terminating node waits for the trainer, which may ask for more with RecordLifecycleActionHeartbeat. Spot
takes its two minutes whatever a hook says (https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks.html)."""
BLOCK_MARGIN = timedelta(minutes=30, seconds=2 * SAVE_SECONDS)
"""EC2 ends the instances of a block 30 minutes before the block, and Auto Scaling groups are to be empty by then
(https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-template-capacity-blocks.html); before that each node may save,
and Auto Scaling ends those of a large group in turns."""
SOON = timedelta(minutes=5)
"""A scheduled action lies in the future when it is made; a block that begins so soon is taken for one that has begun."""

MODES: dict[Backend, tuple[CapacityMode, ...]] = {
    "ec2": ("on-demand", "spot", "reservation", "capacity-block"),
    "hyperpod-slurm": ("on-demand", "spot", "training-plan"),
    "hyperpod-eks": ("on-demand", "spot", "training-plan"),
}
"""HyperPod takes no EC2 reservation and no capacity block; EC2 knows no training plan."""
KEYS: dict[CapacityMode, frozenset[str]] = {
    "on-demand": frozenset(),
    "spot": frozenset({"on_demand_base"}),
    "reservation": frozenset({"reservation", "create", "zone_id", "size", "placement_group", "ends_at"}),
    "capacity-block": frozenset({"reservation", "zone_id", "size", "starts_at", "ends_at"}),
    "training-plan": frozenset({"training_plan", "zone_id", "size", "ends_at"}),
}
"""Which keys of `capacity` mean something in a mode."""
NEEDED: dict[CapacityMode, tuple[str, ...]] = {
    "on-demand": (),
    "spot": (),
    "reservation": ("reservation", "create"),
    "capacity-block": ("reservation",),
    "training-plan": ("training_plan",),
}
"""Exactly one of these."""

_BLOCKS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-using.html"
_RESERVATIONS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-reservations.html"
_PLANS = "https://docs.aws.amazon.com/sagemaker/latest/dg/reserve-capacity-with-training-plans.html"
_TYPES = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceTypeInfo.html"
_SOURCES: dict[CapacityMode, str] = {
    "on-demand": _TYPES,
    "spot": _TYPES,
    "reservation": _RESERVATIONS,
    "capacity-block": _BLOCKS,
    "training-plan": _PLANS,
}


@dataclass(frozen=True)
class Market:
    """What a launch template says about capacity.

    `type` is None for on-demand prices, which reservations have as well. `reservation` is the id where it is known
    before the deployment. A target is all that a template says of it: a launch then takes the reservation or fails, never on
    demand beside it, and a preference beside the target is one option too many
    (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_LaunchTemplateCapacityReservationSpecificationRequest.html,
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-using.html).
    `placement_group` names one that exists; `own_placement_group` asks for one of this group.
    The two words of spot are the only ones that an Auto Scaling group takes.
    """

    type: MarketType | None = None
    spot_type: str | None = None
    interruption: str | None = None
    reservation: str | None = None
    own_placement_group: bool = False
    placement_group: str | None = None


SPOT_STRATEGY, ON_DEMAND_STRATEGY = "capacity-optimized-prioritized", "prioritized"
"""Spot from the pool that is least likely to be interrupted, and the order of types where that leaves a choice; on demand by
the order alone (https://docs.aws.amazon.com/autoscaling/ec2/userguide/allocation-strategies.html)."""


@dataclass(frozen=True)
class Mix:
    """What an Auto Scaling group decides at each launch, in place of its template: the type, the preferred one first, and the
    market: `on_demand_base` nodes on demand, all others spot. A template under such a policy asks for no spot itself
    (https://docs.aws.amazon.com/autoscaling/ec2/userguide/mixed-instances-groups-set-up-overview.html)."""

    types: tuple[str, ...]
    on_demand_base: int


def mix(group: Group) -> Mix | None:
    """Return the mix of a spot group that has several types or nodes on demand; None for every other group."""
    if group.capacity.mode != "spot" or not (group.other_types or group.capacity.on_demand_base):
        return None
    return Mix(group.ec2_types, group.capacity.on_demand_base)


class Shares(NamedTuple):
    """How much of a group is on demand: `base` nodes in any case, and `percent` of all above them."""

    base: int
    percent: int


def shares(group: Group) -> Shares:
    """Return a group's shares. Where a mix has others than its group had, Auto Scaling replaces running nodes to get there
    (`OnDemandBaseCapacity`,
    https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/aws-properties-autoscaling-autoscalinggroup-instancesdistribution.html).
    """
    if group.capacity.mode != "spot":
        return Shares(0, 100)
    return Shares(group.capacity.on_demand_base, 0)


@dataclass(frozen=True)
class ReservationPlan:
    """A reservation that the deployment itself makes; billed from then on, used or not.

    `ends_at` is RFC 3339 in UTC; None: until somebody cancels it.
    """

    group: str
    instance_type: str
    count: int
    zone_id: str
    ends_at: str | None = None

    @property
    def end_type(self) -> str:
        return "limited" if self.ends_at else "unlimited"


def market(group: Group, kind: Instance | None) -> Market:
    """Return the market of an EC2 group of type `kind`; a pair that AWS refuses is `capacity_problems`' business."""
    capacity = group.capacity
    if capacity.mode == "reservation":
        return Market(reservation=capacity.reservation, placement_group=capacity.placement_group)
    if capacity.mode == "capacity-block":
        return Market(type="capacity-block", reservation=capacity.reservation)
    own = group.role == "worker" and group.placement != "none" and _has_placement_groups(kind)
    if capacity.mode == "spot" and mix(group) is None:
        return Market(type="spot", spot_type="one-time", interruption="terminate", own_placement_group=own)
    return Market(own_placement_group=own)


def reservations(spec: ClusterSpec) -> tuple[ReservationPlan, ...]:
    """Return the reservations that the deployment makes (`create`); none with HyperPod, which uses no reservation of EC2."""
    if spec.hyperpod:
        return ()
    return tuple(
        ReservationPlan(
            group=group.name,
            instance_type=group.ec2_type,
            count=group.count,
            zone_id=spec.zone_of(group),
            ends_at=timestamp(group.capacity.ends_at) if group.capacity.ends_at else None,
        )
        for group in spec.workers
        if group.capacity.create
    )


def fill_at(capacity: Capacity, now: datetime) -> str | None:
    """When the group of a capacity block is to be filled, RFC 3339 in UTC; None where the block has begun, or its start is not
    known."""
    if capacity.mode != "capacity-block" or capacity.starts_at is None or capacity.starts_at <= now + SOON:
        return None
    return timestamp(capacity.starts_at)


def empty_at(capacity: Capacity) -> str | None:
    """When the group of a capacity block is to be empty, RFC 3339 in UTC; None without a known end."""
    if capacity.mode != "capacity-block" or capacity.ends_at is None:
        return None
    return timestamp(capacity.ends_at - BLOCK_MARGIN)


def timestamp(moment: datetime) -> str:
    """As Auto Scaling and EC2 write times, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def capacity_problems(group: Group, kind: Instance | None, backend: Backend, prefix: str = "") -> Iterator[Problem]:
    """Everything about the capacity of a group of type `kind` that AWS would refuse, or silently ignore; `prefix` goes before
    each path."""
    mode = group.capacity.mode
    if mode not in MODES[backend]:
        yield _wrong_pair(mode, backend, prefix)
        return
    yield from _key_problems(group.capacity, prefix)
    yield from _creation_problems(group, prefix)
    yield from _placement_problems(group, backend, prefix)
    yield from _type_problems(group, kind, backend, prefix)


def _wrong_pair(mode: CapacityMode, backend: Backend, prefix: str) -> Problem:
    why, fix = "EC2 knows no training plans, they are SageMaker's", "use a hyperpod backend"
    if backend != "ec2":
        why = "HyperPod ignores EC2's capacity reservations and capacity blocks"
        fix = "buy a training plan and give its ARN, or use backend ec2"
    why = f"{mode}: {why}; allowed: {', '.join(MODES[backend])}"
    return finding(f"{prefix}capacity.mode", why, fix, code="CAP-001")


def _key_problems(capacity: Capacity, prefix: str) -> Iterator[Problem]:
    mode, source = capacity.mode, _SOURCES[capacity.mode]
    given = {name for name in Capacity.model_fields if name != "mode" and getattr(capacity, name) not in (None, False)}
    for name in sorted(given - KEYS[mode]):
        modes = ", ".join(other for other, keys in KEYS.items() if name in keys)
        why, fix = f"has no meaning with mode {mode}; allowed with {modes}", f"remove it, or set mode to one of {modes}"
        yield finding(f"{prefix}capacity.{name}", why, fix, code="CAP-003", source=source)
    needed = NEEDED[mode]
    chosen = [name for name in needed if name in given]
    names = " or ".join(needed)
    if needed and not chosen:
        why = f"mode {mode} needs {names}"
        yield finding(f"{prefix}capacity", why, f"give {names}", code="CAP-002", source=source)
    if len(chosen) > 1:
        why = f"{' and '.join(chosen)} exclude each other: use what is there, or make it"
        yield finding(f"{prefix}capacity", why, f"keep one of {', '.join(chosen)}", code="CAP-002", source=source)


def _creation_problems(group: Group, prefix: str) -> Iterator[Problem]:
    capacity = group.capacity
    if not capacity.create:
        return
    for name in ("placement_group", "size"):
        if getattr(capacity, name) is not None:
            why = "describes a reservation that is there; with create it is made for count instances, in no group"
            yield finding(f"{prefix}capacity.{name}", why, "remove it", code="CAP-003")
    if group.count == 0:
        why, fix = "a reservation for no instance cannot be made", "set a count, or mode on-demand until you need it"
        yield finding(f"{prefix}count", why, fix, code="CAP-018")


def _placement_problems(group: Group, backend: Backend, prefix: str) -> Iterator[Problem]:
    """Compare with what is bought: a reservation was made in a placement group, or in none, and a block never is."""
    mode, there = group.capacity.mode, group.capacity.placement_group
    if backend != "ec2" or group.placement is None or not group.capacity.is_reserved:
        return
    if (group.placement == "cluster") != bool(there):
        lie = f"placement group {there}, as the {mode} does" if there else f"no placement group with a {mode}"
        why = f"{group.placement!r} has no effect: the nodes lie in {lie}"
        yield finding(f"{prefix}placement", why, "remove it", code="CAP-020")


def _type_problems(group: Group, kind: Instance | None, backend: Backend, prefix: str) -> Iterator[Problem]:
    mode = group.capacity.mode
    if kind is None:
        return
    sold = {"spot": "spot", "capacity-block": "capacity-block"}.get(mode, "on-demand")
    if mode != "training-plan" and sold not in kind.usage:
        why = f"{kind.name} is not sold as {sold}; allowed: {', '.join(sorted(kind.usage))}"
        yield finding(f"{prefix}capacity.mode", why, "choose another mode or type", code="CAP-007", source=_TYPES)
    if backend != "ec2" or group.role != "worker" or _has_placement_groups(kind):
        return
    if group.capacity.placement_group is not None:
        why, fix = f"{kind.name} cannot be launched into a cluster placement group", "remove it, or choose another type"
        yield finding(f"{prefix}capacity.placement_group", why, fix, code="CAP-016")
    elif not group.capacity.is_reserved and group.placement != "none" and group.count > 1:
        why = f"{kind.name} takes no cluster placement group: the nodes may lie far apart in the zone"
        fix = "choose a type that takes one, or set placement: none"
        yield finding(f"{prefix}instance_type", why, fix, code="CAP-016", level="warning")


def _has_placement_groups(kind: Instance | None) -> bool:
    """Return whether the type can be in a cluster placement group; an unknown type is new hardware, which can."""
    return kind is None or "cluster" in kind.placement
