"""A summary of a description: machines, addresses, and the file system with the rule that decided its size."""

from __future__ import annotations

from collections.abc import Iterator

from infra.config import ClusterSpec, Group
from infra.plan.network.vpc import addresses_needed
from infra.plan.storage.lustre import LustrePlan, lustre_plan


def summary(spec: ClusterSpec) -> tuple[str, ...]:
    """One line for each group, the addresses, and the Lustre file system where there is one."""
    found = lustre_plan(spec)
    addresses = f"{addresses_needed(spec)} addresses of the compute subnet"
    others = [f"{addresses_needed(spec, zone)} addresses of the subnet in {zone}" for zone in spec.other_zones]
    return (*_groups(spec), addresses, *others, *([_lustre(found)] if found else []))


def _groups(spec: ClusterSpec) -> Iterator[str]:
    for group in spec.groups:
        kind = spec.node_of(group)
        efa = f", EFA interfaces: {kind.efa} each" if kind and kind.efa and group.role == "worker" else ""
        yield f"{group.name}: {machines(group)}, {group.capacity.mode}{efa}"
    for machine, what in ((spec.controller, "Slurm"), (spec.monitor, "Prometheus")):
        if machine:
            yield f"{machine.name}: {machines(machine)}, {machine.capacity.mode}, for {what}"


def machines(group: Group) -> str:
    """Return how many machines of which types a group has, and how many of them are always on demand."""
    base = group.capacity.on_demand_base
    always = f", {base} of them on demand" if base else ""
    return f"{group.count} x {' or '.join(group.ec2_types)}{always}"


def _lustre(plan: LustrePlan) -> str:
    if plan.existing:
        return f"Lustre: {plan.existing.id}, which is there"
    size = f"{plan.capacity_gib:,} GiB at {plan.per_tib_mb_s} MB/s per TiB, " if plan.capacity_gib else ""
    efa = "with EFA" if plan.efa else "without EFA"
    return f"Lustre: {size}{plan.throughput_mb_s or 0:,.0f} MB/s in all, {efa}: {plan.binding}"
