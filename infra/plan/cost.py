"""What a cluster costs at list prices, part by part, before it is made.

Sizes and counts are those of the plans, prices those of `infra.catalog.prices`. What goes by use is in no part: S3, logs,
backups, gigabytes through the NAT gateway and the endpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from types import MappingProxyType

from infra.catalog.fsx import automatic_iops
from infra.catalog.kubernetes import VERSIONS
from infra.catalog.prices import HOURS_A_MONTH, Price, RegionPrices
from infra.config import CapacityMode, ClusterSpec, Group
from infra.plan.network.endpoints import interface_services
from infra.plan.network.vpc import has_nat
from infra.plan.nodes.auto_scaling import ROOT_IOPS, ROOT_MB_S
from infra.plan.stack import Plan
from infra.plan.storage.home import EfsPlan, OpenZfsPlan
from infra.plan.storage.lustre import LustrePlan

BASE_IOPS, BASE_MB_S = 3000, 125
"""What every gp3 volume has without extra charge (https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html)."""
SPOT_SHARE = 0.1
"""What remains at least of the price on demand: spot is up to 90 % off (https://aws.amazon.com/ec2/spot/pricing/)."""
BOUGHT: Mapping[CapacityMode, str] = {
    "capacity-block": "paid when the block was bought, not counted",
    "training-plan": "paid when the plan was bought, not counted",
    "reservation": "billed with the reservation that is there, used or not, and not counted",
}
"""What to say of machines that are paid outside of the stack."""
JOBS = "while jobs need all of them, less or nothing else"
"""Of a group that goes to zero."""
ML_TYPES = "types of HyperPod (ml.) are shown at EC2's price; SageMaker's may be higher"


@dataclass(frozen=True)
class Part:
    """One thing that is billed by time. `what` says how much of it, `note` what else to know of the figure.

    `unknown` has what is in this part without a known price; `prices` are those that were used. A part that is always on
    costs the same whether anybody trains or not; the others are machines with accelerators, or that come with jobs, and their
    disks. `least` is the share of the figure that is paid at least.
    """

    name: str
    what: str
    usd_hour: float
    note: str = ""
    always_on: bool = True
    bought: bool = False
    """Paid outside of the stack, so that it counts as nothing."""
    least: float = 1.0
    unknown: tuple[str, ...] = ()
    prices: tuple[Price, ...] = ()

    @property
    def usd_month(self) -> float:
        return self.usd_hour * HOURS_A_MONTH

    @property
    def counted(self) -> bool:
        """Whether the figure says anything: it is 0 of what was bought elsewhere, and of what has no known price."""
        return bool(self.usd_hour) or not (self.bought or self.unknown)


@dataclass(frozen=True)
class Cost:
    """All parts of a cluster in `region`, and what holds for several of them."""

    region: str
    parts: tuple[Part, ...]
    remarks: tuple[str, ...] = ()

    @property
    def usd_hour(self) -> float:
        """While everything runs."""
        return sum(part.usd_hour for part in self.parts)

    @property
    def usd_month(self) -> float:
        return self.usd_hour * HOURS_A_MONTH

    @property
    def least_usd_hour(self) -> float:
        return sum(part.usd_hour * part.least for part in self.parts)

    @property
    def always_on(self) -> Cost:
        """What is billed whether anybody trains or not."""
        return replace(self, parts=tuple(part for part in self.parts if part.always_on))

    @property
    def training(self) -> Cost:
        """Machines with accelerators, and their disks."""
        return replace(self, parts=tuple(part for part in self.parts if not part.always_on))

    @property
    def unknown(self) -> tuple[str, ...]:
        """What has no known price, each once."""
        return tuple(dict.fromkeys(item for part in self.parts for item in part.unknown))

    @property
    def priced_elsewhere(self) -> tuple[str, ...]:
        """Parts that are shown at the price of another region, since that of the cluster's is not known."""
        return tuple(part.name for part in self.parts if not all(item.holds_in(self.region) for item in part.prices))

    @property
    def dates(self) -> tuple[str, ...]:
        """Of the lists that were used, the oldest first."""
        return tuple(sorted({item.date for part in self.parts for item in part.prices}))


def cost(plan: Plan, today: Mapping[str, Price | None] = MappingProxyType({})) -> Cost:
    """Return what a cluster costs by its plan; never raises: what has no price, or no legal size, is unknown.

    `today` has prices that AWS gave now, which go before the catalogue's.
    """
    spec, prices = plan.spec, RegionPrices(plan.place.region, today)
    parts = [part for group in spec.groups for part in _group(spec, group, prices)]
    parts += [*_machines(spec, prices), *_workspace(plan, prices)]
    if plan.lustre and not plan.lustre.existing:
        parts.append(_lustre(plan.lustre, prices))
    if plan.home:
        parts.append(_home(plan.home, prices))
    if plan.eks and not plan.eks.existing:
        parts.append(_eks(plan, prices))
    parts += _network(spec, prices)
    parts.append(_watch(plan, prices))
    return Cost(prices.region, tuple(parts), (ML_TYPES,) if spec.hyperpod else ())


def machine_types(spec: ClusterSpec) -> set[str]:
    """Return the types of the machines that a cluster pays by the hour."""
    paid = [group for group in spec.groups if group.capacity.create or group.capacity.mode not in BOUGHT]
    types = {kind for group in paid for kind in ((group.ec2_type,) if spec.hyperpod else group.ec2_types)}
    return types | {group.ec2_type for group in (spec.controller, spec.monitor) if group}


def _part(
    prices: RegionPrices,
    name: str,
    what: str,
    amounts: Mapping[str, float],
    note: str = "",
    *,
    always_on: bool = True,
    least: float = 1.0,
    unknown: tuple[str, ...] = (),
) -> Part:
    """Return a part of so much of each priced thing."""
    used = {item: prices.of(item) for item, amount in amounts.items() if amount}
    known = {item: value for item, value in used.items() if value}
    return Part(
        name,
        what,
        sum(amounts[item] * value.usd_hour for item, value in known.items()),
        note,
        always_on,
        least=least,
        unknown=(*(item for item in used if item not in known), *unknown),
        prices=tuple(known.values()),
    )


def _group(spec: ClusterSpec, group: Group, prices: RegionPrices) -> Iterator[Part]:
    """Yield a group's machines and their disks."""
    facts, capacity = spec.type_of(group), group.capacity
    accelerated, to_zero = facts is None or bool(facts.accelerators), spec.goes_to_zero(group)
    types = (group.ec2_type,) if spec.hyperpod else group.ec2_types
    what = f"{group.count} x {group.hyperpod_type if spec.hyperpod else ' or '.join(types)}"
    if capacity.mode in BOUGHT and not capacity.create:
        yield Part(group.name, what, 0.0, BOUGHT[capacity.mode], not accelerated, bought=True)
    else:
        yield _part(
            prices,
            group.name,
            what,
            {_dearest(types, prices): group.count},
            "; ".join(filter(None, [JOBS if to_zero else "", _note(group)])),
            always_on=capacity.create or not (accelerated or to_zero),
            least=0.0 if to_zero else _least(group, types, prices),
        )
    disks = {"gp3-gb": group.count * group.root_volume_gib}
    if not spec.hyperpod:
        disks |= {"gp3-iops": group.count * (ROOT_IOPS - BASE_IOPS), "gp3-mb-s": group.count * (ROOT_MB_S - BASE_MB_S)}
    what = f"{group.count} x {group.root_volume_gib} GiB of gp3"
    always = not (accelerated or to_zero)
    yield _part(prices, f"{group.name} disks", what, disks, always_on=always, least=0.0 if to_zero else 1.0)


def _machines(spec: ClusterSpec, prices: RegionPrices) -> Iterator[Part]:
    """Yield Slurm's controller on EC2 with its volumes and its secret, and the monitor with its volumes."""
    found: list[tuple[Group, str, int]] = []
    if (group := spec.controller) and spec.scheduler:
        found.append((group, "Slurm's controller", spec.scheduler.controller.state_gib))
    if group := spec.monitor:
        found.append((group, "Prometheus", spec.observability.monitor.disk_gib))
    for group, what, data in found:
        root = group.root_volume_gib
        secrets = int(group.role == "controller")
        disks = f"{root} and {data} GiB of gp3{', a secret' if secrets else ''}"
        yield _part(prices, group.name, f"1 x {group.ec2_type}, {what}", {group.ec2_type: 1})
        yield _part(prices, f"{group.name} disks", disks, {"gp3-gb": root + data, "secret": secrets})


def _workspace(plan: Plan, prices: RegionPrices) -> Iterator[Part]:
    """Yield the workspace, of which nothing is paid but what is written, kept and queried."""
    if plan.observability.workspace:
        written = prices.of("amp-samples")
        note = f"{written.usd if written else '?'} USD for 10 million samples written, on top; less beyond 2 billion a month"
        used = tuple(filter(None, [written]))
        yield Part("workspace", "Amazon Managed Service for Prometheus", 0.0, note, prices=used)
    if plan.grafana:
        editor, viewer = (price.usd if (price := prices.of(f"grafana-{who}")) else "?" for who in ("editor", "viewer"))
        note = f"{editor} USD a month for each editor or administrator who signs in, {viewer} for each other person"
        yield _part(prices, "Grafana", "Amazon Managed Grafana, one editor", {"grafana-editor": 1}, note)


def _dearest(types: Sequence[str], prices: RegionPrices) -> str:
    """Return the type with the highest price; one without a known price may be dearer than all others."""
    known = {kind: prices.of(kind) for kind in types}
    unpriced = [kind for kind, one in known.items() if one is None]
    return unpriced[0] if unpriced else max(known, key=lambda kind: one.usd_hour if (one := known[kind]) else 0.0)


def _least(group: Group, types: Sequence[str], prices: RegionPrices) -> float:
    """Return the share of the figure, which has the dearest type, that is paid at least: nodes on demand are of the preferred
    type and paid in full, the others may be the cheapest type on cheap spot."""
    if group.capacity.mode != "spot" or not group.count:
        return 1.0
    base = min(group.capacity.on_demand_base, group.count)
    known = [prices.of(kind) for kind in types]
    usd = [each.usd_hour if each else 0.0 for each in known]
    if not all(usd):  # Then the figure is 0, and types are not compared.
        usd = [1.0]
    return (base * usd[0] + SPOT_SHARE * (group.count - base) * min(usd)) / (group.count * max(usd))


def _note(group: Group) -> str:
    if group.capacity.create:
        return "a reservation, billed from its creation on, used or not"
    if group.capacity.mode != "spot":
        return ""
    of = " of the dearest type" if group.other_types else ""
    return f"at the on-demand price{of}, the most that spot costs"


def _lustre(plan: LustrePlan, prices: RegionPrices) -> Part:
    """Of SSD the metadata IOPS above the automatic rate come on top; of Intelligent-Tiering more than has a known price."""
    if plan.tiered_mb_s:
        what, more = f"{plan.tiered_mb_s:,} MB/s of Intelligent-Tiering", ("what Lustre stores, caches and indexes",)
        return _part(prices, "Lustre", what, {"lustre-tiered-mb-s": plan.tiered_mb_s}, unknown=more)
    capacity = plan.capacity_gib or 0
    iops = max((plan.metadata_iops or 0) - automatic_iops(capacity), 0)
    what = f"{capacity:,} GiB at {plan.per_tib_mb_s} MB/s per TiB{f', {iops:,} metadata IOPS more' if iops else ''}"
    return _part(prices, "Lustre", what, {f"lustre-ssd-{plan.per_tib_mb_s}-gb": capacity, "lustre-metadata-iops": iops})


def _home(plan: OpenZfsPlan | EfsPlan, prices: RegionPrices) -> Part:
    """Of EFS nothing is paid but what is stored, read and written."""
    if isinstance(plan, EfsPlan):
        known = {item: prices.of(item) for item in ("efs-gb", "efs-read-gb", "efs-write-gb")}
        stored, read, written = (value.usd if value else "?" for value in known.values())
        note = f"{stored} USD a GB and month, {read} a GB read and {written} a GB written, on top"
        return Part("home", "EFS", 0.0, note, prices=tuple(filter(None, known.values())))
    what = f"{plan.capacity_gib:,} GiB of OpenZFS at {plan.throughput_mb_s:,} MB/s, with a standby"
    return _part(prices, "home", what, {"openzfs-gb": plan.capacity_gib, "openzfs-mb-s": plan.throughput_mb_s})


def _eks(plan: Plan, prices: RegionPrices) -> Part:
    """Return the control plane; with the policy STANDARD it is never in extended support, since EKS upgrades it then."""
    known, today = VERSIONS.get(plan.spec.eks.version), plan.now.astimezone(UTC).date()
    extended = plan.spec.eks.upgrade_policy == "EXTENDED" and known is not None and today >= known.standard_ends
    support = "extended" if extended else "standard"
    what = f"1 control plane of {plan.spec.eks.version}, {support} support"
    return _part(prices, "EKS", what, {f"eks-{support}": 1})


def _network(spec: ClusterSpec, prices: RegionPrices) -> Iterator[Part]:
    if has_nat(spec):
        traffic = prices.of("nat-gb")
        note = f"{traffic.usd} USD a GB on top" if traffic else ""
        yield _part(prices, "NAT gateway", "1 with its address", {"nat": 1, "public-ipv4": 1}, note)
    if services := interface_services(spec):
        yield _part(prices, "endpoints", f"{len(services)} interfaces in one zone", {"endpoint": len(services)})


def _watch(plan: Plan, prices: RegionPrices) -> Part:
    watch = plan.observability
    metrics = sum(len(alarm.metrics) for alarm in watch.alarms)
    what = f"{len(watch.alarms)} alarms over {metrics} metrics{', a dashboard' if watch.dashboard else ''}"
    carried = prices.of("logs-gb") if watch.log_groups else None
    note = f"{carried.usd} USD a GB of logs on top" if carried else ""
    return _part(prices, "CloudWatch", what, {"alarm-metric": metrics, "dashboard": int(watch.dashboard)}, note)
