"""HYP: what HyperPod, with Slurm or EKS, asks of the groups."""

from __future__ import annotations

from infra.catalog.botocore_data import hyperpod_types
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.network.endpoints import ALWAYS, BY_BACKEND
from infra.plan.place import Arn
from infra.preflight.rule import Context, Family, groups, known_groups, listed
from lustrain.problem import did_you_mean

SLURM = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-ref.html#sagemaker-hyperpod-ref-slurm-configuration"
TYPES = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterInstanceGroupSpecification.html"
CREATE = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateCluster.html"
ACCOUNTING = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-external-accounting-db-slurm.html"
DEEP_CHECKS = (
    "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-resiliency-slurm-deep-health-checks.html"
)
MOST_GROUPS = 100
"""Instance groups of one cluster (CREATE)."""
SPECIAL_PARTITIONS = frozenset({"default"})
"""`PartitionName=DEFAULT` in slurm.conf sets defaults and makes no partition (slurm.conf(5))."""
RULES = Family()


@RULES.add("HYP-001", "A Slurm cluster has exactly one controller group, of one machine.", SLURM)
def controller(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-slurm":
        return
    controllers = [(path, group) for path, group in groups(spec) if group.role == "controller"]
    if not controllers:
        fix = "add one: {name: controller, role: controller, instance_type: c5.2xlarge, count: 1}"
        yield finding("groups", "no group has the role controller, which runs slurmctld", fix)
    for path, group in controllers[1:]:
        yield finding(f"{path}.role", f"group {group.name} is a second controller", "keep one")
    for path, group in controllers:
        if group.count != 1:
            yield finding(f"{path}.count", f"{group.count} controllers; HyperPod takes 1", "set count: 1")


@RULES.add("HYP-002", "A Slurm cluster has at most one login group.", SLURM)
def logins(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend == "hyperpod-slurm":
        for path, group in [(path, group) for path, group in groups(spec) if group.role == "login"][1:]:
            yield finding(f"{path}.role", f"group {group.name} is a second login group", "raise the count of the first")


@RULES.add(
    "HYP-003",
    "Controllers exist with hyperpod-slurm only, logins also on EC2 with a scheduler; elsewhere all groups are workers.",
    "infra/config.py",
    essential=True,
)
def roles(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend == "hyperpod-slurm":
        return
    for path, group in groups(spec):
        if group.role != "worker" and not spec.is_login(group):
            message = f"{group.role!r} has no meaning with backend {spec.backend}"
            own = " (scheduler: {type: slurm} makes a controller, and takes logins)" if spec.backend == "ec2" else ""
            yield finding(f"{path}.role", message, f"remove the group{own}, or choose backend: hyperpod-slurm")


@RULES.add("HYP-004", "HyperPod offers the instance type.", TYPES)
def offered(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, _ in known_groups(spec):
        if spec.hyperpod and group.hyperpod_type not in hyperpod_types():
            near = did_you_mean(group.ec2_type, sorted(kind.removeprefix("ml.") for kind in hyperpod_types()))
            fix = f"take another type, or backend: ec2; {near}".removesuffix("; ")
            yield finding(f"{path}.instance_type", f"HyperPod has no {group.hyperpod_type}", fix)


@RULES.add(
    "HYP-005",
    "Deep health checks are for groups with accelerators only: others have nothing to stress.",
    DEEP_CHECKS,
    level="warning",
)
def deep_checks(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        requested = "deep_health_checks" in group.model_fields_set and group.deep_health_checks
        if spec.hyperpod and requested and not facts.accelerators:
            message = f"{group.ec2_type} has no accelerators to check"
            yield finding(f"{path}.deep_health_checks", message, "remove it")


@RULES.add(
    "HYP-006", "Workers with accelerators pass deep health checks before they join.", DEEP_CHECKS, level="warning"
)
def no_deep_checks(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        lasting = group.role == "worker" and group.capacity.mode != "spot" and group.count
        if spec.hyperpod and lasting and facts.accelerators and group.deep_health_checks == ():
            message = f"group {group.name} takes nodes unchecked: a bad GPU or link shows only in training"
            yield finding(f"{path}.deep_health_checks", message, "remove the key, the default runs both checks")


@RULES.add("HYP-007", "Controller and login machines have no accelerators.", SLURM, level="warning")
def costly_head(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        if group.role != "worker" and facts.accelerators:
            message = f"a {group.role} on {group.ec2_type} pays for accelerators that no job gets"
            yield finding(f"{path}.instance_type", message, "take e.g. c5.2xlarge or m5.2xlarge")


@RULES.add("HYP-008", "A HyperPod cluster has at most 100 groups.", CREATE)
def many_groups(spec: ClusterSpec, context: Context) -> Problems:
    if spec.hyperpod and len(spec.groups) > MOST_GROUPS:
        yield finding("groups", f"{len(spec.groups)} groups; HyperPod takes {MOST_GROUPS}", "join groups of one type")


@RULES.add(
    "HYP-009",
    "No Slurm partition is called default, which slurm.conf reads as settings for all.",
    "https://slurm.schedmd.com/slurm.conf.html",
    judgement=True,
)
def partition_name(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-slurm":
        return
    for path, group in groups(spec):
        if group.role == "worker" and group.slurm_partition in SPECIAL_PARTITIONS:
            key = "partition" if group.partition else "name"
            yield finding(f"{path}.{key}", "Slurm reads a partition `default` as settings", "choose another name")


@RULES.add("HYP-010", "Only workers have a partition.", SLURM, level="warning")
def head_partition(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if group.role != "worker" and group.partition:
            yield finding(f"{path}.partition", f"a {group.role} takes no jobs", "remove it")


@RULES.add(
    "HYP-011",
    "HyperPod is known to be offered in the partition.",
    "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod.html",
    level="warning",
)
def elsewhere(spec: ClusterSpec, context: Context) -> Problems:
    if spec.hyperpod and context.partition not in (None, "aws"):
        message = f"HyperPod is not known to be offered in {context.partition}"
        yield finding("backend", message, "ask AWS, or choose backend: ec2")


@RULES.add(
    "HYP-012",
    "Groups that share a Slurm partition have accelerators all or none.",
    "https://slurm.schedmd.com/slurm.conf.html",
    level="warning",
)
def mixed_partition(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "hyperpod-slurm":
        return
    workers = [item for item in known_groups(spec) if item[1].role == "worker"]
    equipped = {group.slurm_partition: group for _, group, facts in workers if facts.accelerators}
    for path, group, facts in workers:
        partition = group.slurm_partition
        if partition in equipped and not facts.accelerators:
            message = f"{group.ec2_type} has no accelerators, {equipped[partition].name} of partition {partition} has"
            message += ": a job over both finds nodes that cannot train"
            yield finding(f"{path}.partition", message, "give it a partition of its own")


@RULES.add(
    "HYP-013",
    "A HyperPod cluster with Slurm has a way to the internet: AWS shows a closed network for EKS only.",
    "https://github.com/awslabs/awsome-distributed-ai/pull/939",
    level="warning",
)
def closed_slurm(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend == "hyperpod-slurm" and spec.network.closed:
        services = listed((*ALWAYS, *BY_BACKEND[spec.backend], "s3"))
        message = f"nodes reach {services} through endpoints and nothing else: AWS shows HyperPod's Slurm with NAT only"
        fix = "bring up one node and read its log before the rest comes, then suppress this; or remove closed"
        yield finding("network.closed", message, fix)


@RULES.add(
    "HYP-015",
    "A group with an image of its own is not patched by HyperPod, whose patches are versions of its own image.",
    "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterAutoPatchConfig.html",
    level="warning",
)
def patched_image(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if spec.hyperpod and group.auto_patch and group.image_id:
            message = f"patches are versions of HyperPod's own image, and the group runs {group.image_id}"
            yield finding(f"{path}.auto_patch", message, "remove it, and name a patched image_id when you have one")


@RULES.add(
    "HYP-016",
    "The interfaces of a group are of a type that its instances' network cards take.",
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html",
)
def interface_types(spec: ClusterSpec, context: Context) -> Problems:
    for path, group, facts in known_groups(spec):
        kinds = sorted(set().union(*(card.kinds for card in facts.cards)) - {"interface"}) if facts.efa else []
        if spec.hyperpod and group.interface_type and group.interface_type not in kinds:
            message = f"{group.ec2_type} takes {' and '.join(kinds) or 'no EFA interfaces'}"
            yield finding(f"{path}.interface_type", message, "remove it, or choose another type")


@RULES.add(
    "HYP-014", "The secret of Slurm's accounting database is of the cluster's region.", ACCOUNTING, level="warning"
)
def secret_elsewhere(spec: ClusterSpec, context: Context) -> Problems:
    database = spec.slurm.accounting
    if spec.backend != "hyperpod-slurm" or database is None or context.region is None:
        return
    if (there := Arn.parse(database.secret_arn).region) != context.region:
        message = f"the secret is in {there}, and the controller reads it in {context.region}"
        yield finding("slurm.accounting.secret_arn", message, f"replicate it to {context.region} and name that one")
