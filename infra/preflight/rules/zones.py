"""NET, of groups in another zone than the cluster's: what EFA, file systems and an existing network make of them."""

from __future__ import annotations

from infra.config import ClusterSpec, Group
from infra.finding import Problems, finding
from infra.plan.nodes.clients import by_default
from infra.plan.storage.lustre import efa_wanted
from infra.preflight.rule import Context, Family, groups, known_groups, listed

EFA = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-limits"
PRICES = "https://aws.amazon.com/ec2/pricing/on-demand/#Data_Transfer_within_the_same_AWS_Region"
RULES = Family()


@RULES.add(
    "NET-015",
    "An existing network has a subnet for each zone that a group names.",
    "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterInstanceGroupSpecification.html",
    essential=True,
)
def subnet_of_zone(spec: ClusterSpec, context: Context) -> Problems:
    existing = spec.network.existing
    for path, group in groups(spec) if existing else ():
        zone = spec.zone_of(group)
        if existing and zone != spec.zone_id and zone not in existing.zone_subnet_ids:
            message = f"no subnet of the existing network is named for {zone}"
            fix = f"add network.existing.zone_subnet_ids: {{{zone}: subnet-…}}"
            yield finding(f"{path}.zone_id", message, fix)


@RULES.add("NET-016", "Workers with EFA that can get one job lie in one zone: EFA does not leave it.", EFA)
def group_of_one_zone(spec: ClusterSpec, context: Context) -> Problems:
    workers = [(path, group) for path, group, facts in known_groups(spec) if facts.efa and group.role == "worker"]
    for index, (path, group) in enumerate(workers):
        for _, other in workers[:index]:
            if spec.zone_of(group) != spec.zone_of(other) and _one_job(spec, group, other):
                message = f"{group.name} lies in {spec.zone_of(group)}, {other.name} in {spec.zone_of(other)}"
                slurm = spec.backend == "hyperpod-slurm"
                what = "a job of their partition" if slurm else "a job that is not held to one of them"
                fix = "give each a partition of its own" if slurm else "hold jobs to one group, then suppress this"
                message += f": {what} hangs at its first collective"
                yield finding(f"{path}.zone_id", message, fix, level="error" if slurm else "warning")
                break


@RULES.add("NET-017", "Workers lie in the zone of the file systems.", PRICES, level="warning")
def storage_elsewhere(spec: ClusterSpec, context: Context) -> Problems:
    homes = spec.storage.home
    # EFS has a mount target in every zone of nodes.
    there = listed(
        name for name, lies in (("lustre", spec.storage.lustre), ("home", homes and homes.type == "openzfs")) if lies
    )
    for path, group in groups(spec) if there else ():
        if group.role == "worker" and spec.zone_of(group) != spec.zone_id:
            efa = efa_wanted(spec) and by_default(spec.node_of(group))
            slow = ", and Lustre comes over TCP: EFA does not leave the zone" if efa else ""
            message = f"{there} in {spec.zone_id}: every byte crosses zones and is billed both ways{slow}"
            yield finding(f"{path}.zone_id", message, "read from S3, or make a cluster of its own there")


def _one_job(spec: ClusterSpec, group: Group, other: Group) -> bool:
    """Slurm holds a job to a partition; elsewhere nothing does."""
    if spec.backend != "hyperpod-slurm":
        return True
    return group.slurm_partition == other.slurm_partition
