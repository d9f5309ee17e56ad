"""HYP: what HyperPod, with Slurm or EKS, asks of the groups."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from infra.config import ClusterSpec
from infra.plan.network.endpoints import ALWAYS, BY_BACKEND
from infra.preflight.finding import Finding
from infra.preflight.hyperpod_types import OFFERED, SOURCE
from infra.preflight.rule import Context, OfflineRule, groups, known_groups, listed

SLURM = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-ref.html#sagemaker-hyperpod-ref-slurm-configuration"
CREATE = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateCluster.html"
ACCOUNTING = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-external-accounting-db-slurm.html"
DEEP_CHECKS = (
    "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-resiliency-slurm-deep-health-checks.html"
)
MOST_GROUPS = 100
"""Instance groups of one cluster (CREATE)."""
SPECIAL_PARTITIONS = frozenset({"default"})
"""`PartitionName=DEFAULT` in slurm.conf sets defaults and makes no partition (slurm.conf(5))."""


class Controller(OfflineRule):
    code = "HYP-001"
    checks = "A Slurm cluster has exactly one controller group, of one machine."
    source = SLURM

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.backend != "hyperpod-slurm":
            return
        found = [(path, group) for path, group in groups(spec) if group.role == "controller"]
        if not found:
            fix = "add one: {name: controller, role: controller, instance_type: c5.2xlarge, count: 1}"
            yield self.finding("groups", "no group has the role controller, which runs slurmctld", fix)
        for path, group in found[1:]:
            yield self.finding(f"{path}.role", f"group {group.name} is a second controller", "keep one")
        for path, group in found:
            if group.count != 1:
                yield self.finding(f"{path}.count", f"{group.count} controllers; HyperPod takes 1", "set count: 1")


class Logins(OfflineRule):
    code = "HYP-002"
    checks = "A Slurm cluster has at most one login group."
    source = SLURM

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.backend == "hyperpod-slurm":
            for path, group in [(path, group) for path, group in groups(spec) if group.role == "login"][1:]:
                yield self.finding(
                    f"{path}.role", f"group {group.name} is a second login group", "raise the count of the first"
                )


class Roles(OfflineRule):
    code = "HYP-003"
    checks = "Controllers and logins exist with hyperpod-slurm only; elsewhere all groups are workers."
    source = "infra/config.py"
    essential = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.backend == "hyperpod-slurm":
            return
        for path, group in groups(spec):
            if group.role != "worker":
                message = f"{group.role!r} has no meaning with backend {spec.backend}"
                yield self.finding(f"{path}.role", message, "remove the group, or choose backend: hyperpod-slurm")


class Offered(OfflineRule):
    code = "HYP-004"
    checks = "HyperPod offers the instance type."
    source = SOURCE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, _ in known_groups(spec):
            if spec.hyperpod and group.hyperpod_type not in OFFERED:
                close = get_close_matches(group.hyperpod_type, sorted(OFFERED), 2, 0.7)
                fix = f"take {' or '.join(one.removeprefix('ml.') for one in close)}" if close else "take another type"
                yield self.finding(
                    f"{path}.instance_type", f"HyperPod has no {group.hyperpod_type}", f"{fix}, or backend: ec2"
                )


class DeepChecks(OfflineRule):
    code = "HYP-005"
    level = "warning"
    checks = "Deep health checks are asked for groups with accelerators only: others have nothing to stress."
    source = DEEP_CHECKS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            asked = "deep_health_checks" in group.model_fields_set and group.deep_health_checks
            if spec.hyperpod and asked and not facts.accelerators:
                message = f"{group.ec2_type} has no accelerators to check"
                yield self.finding(f"{path}.deep_health_checks", message, "remove it")


class NoDeepChecks(OfflineRule):
    code = "HYP-006"
    level = "warning"
    checks = "Workers with accelerators pass deep health checks before they join."
    source = DEEP_CHECKS

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            if spec.hyperpod and group.role == "worker" and facts.accelerators and not group.deep_health_checks:
                message = f"group {group.name} takes nodes unchecked: a bad GPU or link shows only in training"
                yield self.finding(
                    f"{path}.deep_health_checks", message, "remove the key, the default runs both checks"
                )


class CostlyHead(OfflineRule):
    code = "HYP-007"
    level = "warning"
    checks = "Controller and login machines have no accelerators."
    source = SLURM

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group, facts in known_groups(spec):
            if group.role != "worker" and facts.accelerators:
                message = f"a {group.role} on {group.ec2_type} pays for accelerators that no job gets"
                yield self.finding(f"{path}.instance_type", message, "take e.g. c5.2xlarge or m5.2xlarge")


class ManyGroups(OfflineRule):
    code = "HYP-008"
    checks = "A HyperPod cluster has at most 100 groups."
    source = CREATE

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.hyperpod and len(spec.groups) > MOST_GROUPS:
            yield self.finding(
                "groups", f"{len(spec.groups)} groups; HyperPod takes {MOST_GROUPS}", "join groups of one type"
            )


class PartitionName(OfflineRule):
    code = "HYP-009"
    checks = "No Slurm partition is called default, which slurm.conf reads as settings for all."
    source = "https://slurm.schedmd.com/slurm.conf.html"
    judgement = True

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.backend != "hyperpod-slurm":
            return
        for path, group in groups(spec):
            if group.role == "worker" and (group.partition or group.name) in SPECIAL_PARTITIONS:
                key = "partition" if group.partition else "name"
                yield self.finding(
                    f"{path}.{key}", "Slurm reads a partition `default` as settings", "choose another name"
                )


class HeadPartition(OfflineRule):
    code = "HYP-010"
    level = "warning"
    checks = "Only workers have a partition."
    source = SLURM

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group in groups(spec):
            if group.role != "worker" and group.partition:
                yield self.finding(f"{path}.partition", f"a {group.role} takes no jobs", "remove it")


class MixedPartition(OfflineRule):
    code = "HYP-012"
    level = "warning"
    checks = "Groups that share a Slurm partition have accelerators all or none."
    source = "https://slurm.schedmd.com/slurm.conf.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.backend != "hyperpod-slurm":
            return
        workers = [one for one in known_groups(spec) if one[1].role == "worker"]
        equipped = {group.partition or group.name: group for _, group, facts in workers if facts.accelerators}
        for path, group, facts in workers:
            partition = group.partition or group.name
            if partition in equipped and not facts.accelerators:
                message = (
                    f"{group.ec2_type} has no accelerators, {equipped[partition].name} of partition {partition} has"
                )
                message += ": a job over both finds nodes that cannot train"
                yield self.finding(f"{path}.partition", message, "give it a partition of its own")


class Elsewhere(OfflineRule):
    code = "HYP-011"
    level = "warning"
    checks = "HyperPod is known to be offered in the partition."
    source = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.hyperpod and context.partition not in (None, "aws"):
            message = f"HyperPod is not known to be offered in {context.partition}"
            yield self.finding("backend", message, "ask AWS, or choose backend: ec2")


class ClosedSlurm(OfflineRule):
    code = "HYP-013"
    level = "warning"
    checks = "A HyperPod cluster with Slurm has a way to the internet: AWS shows a closed network for EKS only."
    source = "https://github.com/awslabs/awsome-distributed-ai/pull/939"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        if spec.backend == "hyperpod-slurm" and spec.network.closed:
            services = listed((*ALWAYS, *BY_BACKEND[spec.backend], "s3"))
            message = (
                f"nodes reach {services} through endpoints and nothing else: AWS shows HyperPod's Slurm with NAT only"
            )
            fix = "bring up one node and read its log before the rest comes, then suppress this; or remove closed"
            yield self.finding("network.closed", message, fix)


class PatchedImage(OfflineRule):
    code = "HYP-015"
    level = "warning"
    checks = "A group with an image of its own is not patched by HyperPod, whose patches are versions of its own image."
    source = "https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterAutoPatchConfig.html"

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        for path, group in groups(spec):
            if spec.hyperpod and group.auto_patch and group.image_id:
                message = f"patches are versions of HyperPod's own image, and the group runs {group.image_id}"
                yield self.finding(
                    f"{path}.auto_patch", message, "remove it, and name a patched image_id when you have one"
                )


class SecretElsewhere(OfflineRule):
    code = "HYP-014"
    level = "warning"
    checks = "The secret of Slurm's accounting database is of the cluster's region."
    source = ACCOUNTING

    def check(self, spec: ClusterSpec, context: Context) -> Iterable[Finding]:
        database = spec.slurm.accounting
        if spec.backend != "hyperpod-slurm" or database is None or context.region is None:
            return
        if (there := database.secret_arn.split(":")[3]) != context.region:
            message = f"the secret is in {there}, and the controller reads it in {context.region}"
            yield self.finding(
                "slurm.accounting.secret_arn", message, f"replicate it to {context.region} and name that one"
            )


RULES = (
    Controller(),
    Logins(),
    Roles(),
    Offered(),
    DeepChecks(),
    NoDeepChecks(),
    CostlyHead(),
    ManyGroups(),
    PartitionName(),
    HeadPartition(),
    Elsewhere(),
    MixedPartition(),
    ClosedSlurm(),
    PatchedImage(),
    SecretElsewhere(),
)
