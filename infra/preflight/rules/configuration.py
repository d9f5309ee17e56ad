"""CFG: names, tags, keys without a meaning, and what contradicts itself within the config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pydantic import BaseModel

from infra.catalog.botocore_data import botocore_version, regions
from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.nodes.auto_scaling import untaggable
from infra.plan.nodes.bundle import SCRIPT_KEY, user_script
from infra.preflight.rule import Context, Family, groups, known_groups, listed
from lustrain.problem import UserError, did_you_mean

TAGS = "https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html"
OURS = "infra/config.py"
MOST_TAGS, LONGEST_KEY, LONGEST_VALUE = 50, 128, 256
"""Limits of a resource's tags (TAGS)."""
SPARE_TAGS = 2
"""Beside ours and the user's, resources carry `Name` and one that their service sets."""

ONLY_WITH_GROUP: dict[str, tuple[str, ...]] = {
    "partition": ("hyperpod-slurm",),
    "labels": ("hyperpod-eks",),
    "taints": ("hyperpod-eks",),
    "interface_type": ("hyperpod-slurm", "hyperpod-eks"),
    "auto_patch": ("hyperpod-slurm", "hyperpod-eks"),
    "deep_health_checks": ("hyperpod-slurm", "hyperpod-eks"),
    "efa": ("ec2",),
    "other_types": ("ec2",),
    "placement": ("ec2",),
}
"""Keys of a group that only some backends look at."""
ONLY_WITH: dict[str, tuple[str, ...]] = {
    "slurm": ("hyperpod-slurm",),
    "eks": ("hyperpod-eks",),
    "access.ssh_key": ("ec2",),
    "access.instance_profile": ("ec2",),
    "access.admin_roles": ("hyperpod-eks",),
    "network.second_zone_id": ("hyperpod-eks",),
    "network.existing.control_subnet_ids": ("hyperpod-eks",),
    "network.nic_policy": ("ec2",),
}
"""Keys elsewhere that only some backends look at; HyperPod lays out network interfaces by itself."""
REGION = "aws:region"
REGIONS = "https://docs.aws.amazon.com/global-infrastructure/latest/regions/aws-regions.html"
RULES = Family()


@RULES.add(
    "CFG-001",
    "No two groups have the same name.",
    "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterInstanceGroupSpecification.html",
    essential=True,
)
def group_names(spec: ClusterSpec, context: Context) -> Problems:
    counts = Counter(group.name for group in spec.groups)
    for path, group in groups(spec):
        if counts[group.name] > 1:
            counts[group.name] = 0
            yield finding(
                f"{path}.name",
                f"{group.name!r} is the name of more than one group",
                "give each group a name of its own",
            )


@RULES.add("CFG-002", "There is a group of workers.", OURS, essential=True)
def workers(spec: ClusterSpec, context: Context) -> Problems:
    if not spec.workers:
        yield finding("groups", "no group has the role worker, so nothing trains", "add a group with role: worker")


@RULES.add("CFG-003", "A group has machines.", OURS, level="warning")
def empty_group(spec: ClusterSpec, context: Context) -> Problems:
    workers = sum(group.count for group in spec.workers)
    chips = sum(
        group.count * accelerator.count
        for _, group, facts in known_groups(spec)
        if group.role == "worker"
        for accelerator in facts.accelerators
    )
    for path, group in groups(spec):
        if group.count == 0 and not spec.eks.karpenter:
            message = f"group {group.name} has 0 machines: the cluster has {workers} workers with {chips} accelerators"
            yield finding(f"{path}.count", message, "set 1 or more, or remove the group")


@RULES.add(
    "CFG-004",
    "min_count is not above count.",
    "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterInstanceGroupSpecification.html",
)
def min_count(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if group.min_count is not None and group.min_count > group.count:
            message = f"{group.min_count} is more than count = {group.count}"
            yield finding(f"{path}.min_count", message, f"set at most {group.count}")


@RULES.add("CFG-005", "EC2 groups come whole or not at all: they have no min_count, but for 0 with a scheduler.", OURS)
def ec2_group_min_count(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if spec.backend == "ec2" and group.min_count not in (None, group.count) and not spec.goes_to_zero(group):
            message = (
                f"{group.min_count} of {group.count} machines cannot be had with backend ec2: its groups come whole"
            )
            fix = (
                "remove it, or lower count"
                if group.min_count
                else "remove it, or take a scheduler, whose jobs bring machines"
            )
            yield finding(f"{path}.min_count", message, fix)


@RULES.add(
    "CFG-006",
    "A group's keys have a meaning with the backend (partition, labels, taints, interface_type, auto_patch, "
    "deep_health_checks, efa, placement, other_types).",
    OURS,
    level="warning",
)
def key_of_other_backend(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        for key, backends in ONLY_WITH_GROUP.items():
            useless = spec.backend not in backends and not (key == "partition" and spec.controller)
            if useless and _set(group, key) and getattr(group, key) not in (None, (), {}):
                yield finding(f"{path}.{key}", _no_effect(spec, backends), "remove it")


@RULES.add(
    "CFG-007",
    "Other keys have a meaning with the backend (slurm, eks, ssh_key, instance_profile, admin_roles, nic_policy, "
    "second_zone_id, control_subnet_ids).",
    OURS,
    level="warning",
)
def section_of_other_backend(spec: ClusterSpec, context: Context) -> Problems:
    for path, backends in ONLY_WITH.items():
        if spec.backend not in backends and _reached(spec, path):
            yield finding(path, _no_effect(spec, backends), "remove it")


@RULES.add(
    "CFG-008", "Tags keep AWS's limits: 50 a resource, keys of 128 and values of 256 characters, no aws: prefix.", TAGS
)
def tags_rule(spec: ClusterSpec, context: Context) -> Problems:
    most = MOST_TAGS - SPARE_TAGS
    if len(context.plan.tags) > most:
        message = f"{len(spec.tags)} tags, with Lustrain's own and the service's more than {MOST_TAGS}"
        yield finding("tags", message, f"leave {most - len(context.plan.tags) + len(spec.tags)} at most")
    for key, value in spec.tags.items():
        for why in _wrong_with_tag(key, value):
            yield finding(f"tags.{key}", why, "rename or shorten it")


@RULES.add(
    "CFG-009", "Tags under lustrain: are Lustrain's own; budget and node role go by them.", "infra/plan/place.py"
)
def reserved_tags(spec: ClusterSpec, context: Context) -> Problems:
    for key in spec.tags:
        if key.lower().startswith("lustrain:"):
            yield finding(f"tags.{key}", "the prefix lustrain: is reserved", "rename it")


@RULES.add("CFG-010", "job_ends_at is in the future.", OURS, level="warning")
def too_late(spec: ClusterSpec, context: Context) -> Problems:
    if spec.job_ends_at and context.now and spec.job_ends_at < context.now:
        yield finding("job_ends_at", f"{spec.job_ends_at.isoformat()} is in the past", "set a later time or remove it")


@RULES.add(
    "CFG-011",
    "With backend ec2, tags are ones that the instance metadata service can show.",
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/work-with-tags-in-IMDS.html",
)
def metadata_tags(spec: ClusterSpec, context: Context) -> Problems:
    for key in untaggable(spec.tags) if spec.backend == "ec2" else ():
        yield finding(
            f"tags.{key}",
            "EC2 refuses an instance with this key while its metadata service shows tags",
            "rename it",
        )


@RULES.add(
    "CFG-014",
    "The script of boot.on_configured is there, and is one that a node can run: a first line with #!, and LF.",
    "infra/plan/nodes/bundle.py",
    essential=True,
)
def script(spec: ClusterSpec, context: Context) -> Problems:
    try:
        user_script(spec)
    except UserError as error:
        for flaw in error.problems:
            fix = flaw.fix or f"begin it with {flaw.allowed}"
            yield finding(SCRIPT_KEY, f"{spec.boot.on_configured} {flaw.why}", fix)


def _wrong_with_tag(key: str, value: str) -> Iterator[str]:
    if not 1 <= len(key) <= LONGEST_KEY:
        yield f"a key of {len(key)} characters; allowed: 1 to {LONGEST_KEY}"
    if len(value) > LONGEST_VALUE:
        yield f"a value of {len(value)} characters; allowed: up to {LONGEST_VALUE}"
    if key.lower().startswith("aws:"):
        yield "the prefix aws: is AWS's own"
    for what, text in (("key", key), ("value", value)):
        odd = sorted({item for item in text if not (item.isalnum() or item in " _.:/=+-@")})
        if odd:
            yield f"{' '.join(map(repr, odd))} in the {what}; allowed: letters, digits, spaces and _ . : / = + - @"


def _set(table: BaseModel, key: str) -> bool:
    return key in table.model_fields_set


def _reached(spec: ClusterSpec, path: str) -> bool:
    """Whether the user wrote this key."""
    table: object = spec
    for key in path.split("."):
        if not isinstance(table, BaseModel) or not _set(table, key):
            return False
        table = getattr(table, key)
    return bool(table) or isinstance(table, BaseModel)


def _no_effect(spec: ClusterSpec, backends: tuple[str, ...]) -> str:
    return f"has no effect with backend {spec.backend}, only with {listed(backends)}"


@RULES.add("CFG-012", "The region exists.", REGIONS)
def known_region(spec: ClusterSpec, context: Context) -> Problems:
    if context.region is not None and context.region not in regions():
        meant = did_you_mean(context.region, sorted(regions())) or "write a region like us-east-1."
        message = f"{context.region} is not among the regions of botocore {botocore_version()}"
        yield finding(REGION, message, f"{meant} If the region is new, suppress this")


@RULES.add(
    "CFG-013",
    "The stack names its region: without it the rules about zones, partitions and names are silent.",
    REGIONS,
    level="warning",
)
def region_named(spec: ClusterSpec, context: Context) -> Problems:
    if context.region is None:
        message = "is missing: nothing that depends on the region was checked"
        yield finding(REGION, message, "set it in Pulumi.<stack>.yaml, or set AWS_REGION")
