"""CAP: where machines come from, and whether that fits backend, type, zone, size and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from infra.catalog.ultraservers import ULTRASERVER_BLOCKS, ULTRASERVER_SIZES
from infra.config import CapacityMode, ClusterSpec, Group
from infra.finding import Problems, finding
from infra.plan.nodes.capacity import BLOCK_MARGIN, capacity_problems, market
from infra.plan.place import Arn
from infra.preflight.rule import Context, Family, groups, listed

HYPERPOD_PLANS = "https://docs.aws.amazon.com/sagemaker/latest/dg/reserve-capacity-with-training-plans.html"
BLOCKS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html"
RESERVATIONS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-reservations.html"
SPOT = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-instances.html"
MIXED = "https://docs.aws.amazon.com/autoscaling/ec2/userguide/mixed-instances-groups-set-up-overview.html"
PLACEMENT = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-groups.html"


SHOWS_END: Mapping[CapacityMode, str] = {
    "capacity-block": "aws ec2 describe-capacity-reservations",
    "training-plan": "aws sagemaker describe-training-plan",
}
"""Capacity that always ends, and what shows when."""
RULES = Family()


@RULES.add(
    "CAP-001",
    "The backend can use the capacity: reservations and blocks are EC2's, training plans HyperPod's.",
    HYPERPOD_PLANS,
    essential=True,
)
@RULES.add(
    "CAP-002",
    "A reservation, block or plan is named, or a reservation is to be made, not both.",
    RESERVATIONS,
    essential=True,
)
@RULES.add(
    "CAP-003", "Capacity has no keys of another mode, and of a reservation that is to be made no facts.", RESERVATIONS
)
@RULES.add("CAP-007", "The instance type is sold that way (spot, capacity block).", SPOT)
@RULES.add("CAP-016", "An EC2 group's instance type may be in a cluster placement group.", PLACEMENT)
@RULES.add(
    "CAP-020",
    "Placement is chosen where the stack makes the placement group: on demand and for spot.",
    PLACEMENT,
    judgement=True,
)
@RULES.add("CAP-018", "A reservation that is to be made is for one machine at least.", RESERVATIONS)
def plan_problems(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        yield from capacity_problems(group, spec.type_of(group), spec.backend, f"{path}.")


@RULES.add(
    "CAP-004",
    "A reservation, block or plan lies in the group's zone, which is the cluster's unless it names another.",
    RESERVATIONS,
)
def zone_of_capacity(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        zone = group.capacity.zone_id
        mine = spec.zone_of(group)
        if zone and zone != mine:
            whose = "group" if group.zone_id else "cluster"
            message = f"the capacity lies in {zone}, the {whose} in {mine}: its machines would never start"
            yield finding(f"{path}.capacity.zone_id", message, f"set zone_id: {zone}, or use capacity in {mine}")


@RULES.add("CAP-005", "A reservation, block or plan holds all the machines that groups take from it.", RESERVATIONS)
def size(spec: ClusterSpec, context: Context) -> Problems:
    for named, sharing in _shared(spec).items():
        wanted = sum(group.count for _, group in sharing)
        sizes = [group.capacity.size for _, group in sharing if group.capacity.size]
        if sizes and wanted > min(sizes):
            message = f"{named} holds {min(sizes)}, {listed(group.name for _, group in sharing)} want {wanted}"
            yield finding(f"{sharing[0][0]}.capacity.size", message, "lower count, or get more capacity")


@RULES.add("CAP-006", "Groups that share a reservation or block have one instance type.", RESERVATIONS)
def one_type_per_reservation(spec: ClusterSpec, context: Context) -> Problems:
    for named, sharing in _shared(spec).items():
        types = dict.fromkeys(group.ec2_type for _, group in sharing)
        if len(types) > 1 and not named.startswith("arn:"):
            message = f"{named} is of one instance type, groups take {listed(types)} from it"
            yield finding(f"{sharing[-1][0]}.capacity.reservation", message, "give each type its own reservation")


@RULES.add("CAP-008", "A training plan is of the cluster's region and account.", HYPERPOD_PLANS)
def plan_elsewhere(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if not group.capacity.training_plan:
            continue
        plan = Arn.parse(group.capacity.training_plan)
        here = f"{path}.capacity.training_plan"
        if context.region and plan.region != context.region:
            yield finding(
                here, f"the plan is in {plan.region}, the cluster in {context.region}", "use a plan of the region"
            )
        if context.account and plan.account != context.account:
            yield finding(
                here, f"the plan is account {plan.account}'s, this is {context.account}", "use a plan of the account"
            )


@RULES.add(
    "CAP-009",
    "Capacity lasts until the job's end; a block's machines go 30 minutes before it, and saving takes time.",
    BLOCKS,
    judgement=True,
)
def ends_before_job(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        ends = group.capacity.ends_at
        if ends and spec.job_ends_at and spec.job_ends_at > ends - BLOCK_MARGIN:
            last = (ends - BLOCK_MARGIN).isoformat()
            message = f"nodes are to be empty by {last}, the job ends {spec.job_ends_at.isoformat()}"
            yield finding(f"{path}.capacity.ends_at", message, "extend the capacity, or end the job earlier")


@RULES.add(
    "CAP-010",
    "The end of a block or plan is known; the trainer saves and stops before where interrupt.deadline is set to it.",
    BLOCKS,
    level="warning",
)
def end_unknown(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        mode = group.capacity.mode
        if mode in SHOWS_END and not group.capacity.ends_at:
            message = f"the end of the {mode} is not known, so nothing stops in time"
            fix = f"set it, and the trainer's interrupt.deadline to it; `{SHOWS_END[mode]}` shows it"
            yield finding(f"{path}.capacity.ends_at", message, fix)


@RULES.add("CAP-011", "A reservation, block or plan has not ended yet, and leaves time to save.", BLOCKS)
def over(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        ends = group.capacity.ends_at
        if ends and context.now and ends - BLOCK_MARGIN <= context.now:
            message = f"it ends {ends.isoformat()}, and nodes are to be empty since {(ends - BLOCK_MARGIN).isoformat()}"
            yield finding(f"{path}.capacity.ends_at", message, "use other capacity")


@RULES.add("CAP-021", "A capacity block begins before its nodes are to be empty again.", BLOCKS)
def ends_before_start(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        starts, ends = group.capacity.starts_at, group.capacity.ends_at
        if starts and ends and starts >= ends - BLOCK_MARGIN:
            message = (
                f"{starts.isoformat()} is not before {(ends - BLOCK_MARGIN).isoformat()}, when nodes are to be empty"
            )
            yield finding(f"{path}.capacity.starts_at", message, f"`{SHOWS_END['capacity-block']}` shows both times")


@RULES.add(
    "CAP-012",
    "Zone and size of a reservation, block or plan are known, so that they can be compared without asking AWS.",
    RESERVATIONS,
    level="warning",
)
def place_unknown(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        has = group.capacity
        missing = [key for key in ("zone_id", "size") if getattr(has, key) is None]
        if (has.reservation or has.training_plan) and missing:
            message = f"{listed(missing)} of the {has.mode} are not compared with the cluster's"
            yield finding(f"{path}.capacity", message, "set them, or run `fab preflight --online`")


@RULES.add(
    "CAP-014", "Controller and login machines are not spot: their end ends the Slurm cluster.", SPOT, judgement=True
)
def head_on_spot(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if group.role != "worker" and group.capacity.mode == "spot":
            message = f"a {group.role} on spot may go at any time, and the cluster with it"
            yield finding(f"{path}.capacity.mode", message, "set mode: on-demand")


@RULES.add(
    "CAP-015",
    "HyperPod spot groups are documented with EKS only, not with Slurm.",
    "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterCapacityRequirements.html",
    level="warning",
)
def spot_with_slurm(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if spec.backend == "hyperpod-slurm" and group.role == "worker" and group.capacity.mode == "spot":
            message = "the API takes spot with Slurm, but AWS documents it with EKS only"
            yield finding(f"{path}.capacity.mode", message, "try it with one machine, or choose hyperpod-eks or ec2")


@RULES.add("CAP-017", "A large group of spot accelerators is unlikely to come whole.", SPOT, level="warning")
def spot_group(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        kinds = [spec.type_of(group.of_type(name)) for name in group.ec2_types]
        nodes = group.count - group.capacity.on_demand_base
        large = spec.backend == "ec2" and group.capacity.mode == "spot" and nodes > LARGE_GANG
        # A type that blocks do not sell may be there where the others are not.
        if large and all(kind and "capacity-block" in kind.usage for kind in kinds):
            message = f"{nodes} x {' or '.join(group.ec2_types)} on spot, all or none, in one zone: rarely available"
            yield finding(f"{path}.count", message, "lower count, or buy a capacity block")


@RULES.add(
    "CAP-019",
    "A reservation that the stack makes ends some day: it bills until it is cancelled, used or not.",
    RESERVATIONS,
    level="warning",
)
def endless_reservation(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if group.capacity.create and group.capacity.ends_at is None:
            message = f"{group.count} x {group.ec2_type} are billed without end, and `pulumi destroy` keeps them"
            yield finding(f"{path}.capacity.ends_at", message, "set when you need them no longer")


@RULES.add(
    "CAP-022",
    "Several types, and nodes that are always on demand, are for spot groups on EC2: some nodes of such a group are spot, and "
    "no type stands twice.",
    MIXED,
    judgement=True,
)
def mixed(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        base, here = group.capacity.on_demand_base, f"{path}.capacity.on_demand_base"
        if group.capacity.mode != "spot" and group.other_types and spec.backend == "ec2":
            message = f"has no effect with mode {group.capacity.mode}: a group has several types for spot only"
            yield finding(f"{path}.other_types", message, "set capacity.mode: spot, or remove it")
        if base and spec.hyperpod:
            yield finding(here, "HyperPod mixes no markets in a group", "make a second group, on demand")
        elif base >= group.count > 0:
            message = f"{base} of {group.count} nodes on demand leave none for spot"
            yield finding(here, message, f"set {group.count - 1} at most, or mode: on-demand")
        for index, kind in enumerate(group.other_types):
            if kind in group.ec2_types[: index + 1]:
                yield finding(f"{path}.other_types.{index}", f"{kind} stands twice", "keep one")


@RULES.add(
    "CAP-023",
    "A group of several types is in no cluster placement group, where EC2 advises one type.",
    PLACEMENT,
    level="warning",
)
def mixed_placement(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if spec.backend == "ec2" and group.other_types and market(group, spec.type_of(group)).own_placement_group:
            message = "nodes of several types seldom find room in one cluster placement group"
            yield finding(f"{path}.placement", message, "set placement: none")


LARGE_GANG = 4
"""Above this many spot machines of a kind that AWS also sells in blocks we warn; our own line, AWS names none."""


def _shared(spec: ClusterSpec) -> dict[str, list[tuple[str, Group]]]:
    """Return groups by the reservation, block or plan that they take machines from."""
    shared: dict[str, list[tuple[str, Group]]] = defaultdict(list)
    for path, group in groups(spec):
        if named := group.capacity.reservation or group.capacity.training_plan:
            shared[named].append((path, group))
    return shared


@RULES.add(
    "CAP-024",
    "A type that comes only in UltraServers is in a capacity block, on EC2 that of one UltraServer, or in a training plan.",
    ULTRASERVER_BLOCKS,
)
def ultraservers(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        sizes, capacity = ULTRASERVER_SIZES.get(group.ec2_type, ()), group.capacity
        bought: CapacityMode = "training-plan" if spec.hyperpod else "capacity-block"
        each = " or ".join(map(str, sizes))
        if sizes and capacity.mode != bought:
            message = f"{group.ec2_type} comes only in UltraServers of {each} instances, not {capacity.mode}"
            yield finding(f"{path}.capacity.mode", message, f"buy a {bought.replace('-', ' ')} and name it")
        elif sizes and not spec.hyperpod and capacity.size and capacity.size not in sizes:
            message = (
                f"a block of {capacity.size}: each block of {group.ec2_type} is one UltraServer, of {each} instances"
            )
            yield finding(f"{path}.capacity.size", message, "write its size, and make a group for each UltraServer")
