"""IAM: ARNs of keys and roles, and who logs in."""

from __future__ import annotations

import re
from collections.abc import Iterator

from infra.config import ClusterSpec
from infra.finding import Problems, finding
from infra.plan.documents import characters
from infra.plan.nodes.controller import accounting_secret
from infra.plan.place import Arn
from infra.plan.roles import EKS_ROLES, roles
from infra.plan.storage.associations import association_key
from infra.preflight.rule import Context, Family, groups, named_twice

ARNS = "https://docs.aws.amazon.com/IAM/latest/UserGuide/reference-arns.html"
QUOTAS = "https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html"
KEYS = "https://docs.aws.amazon.com/kms/latest/developerguide/concepts.html#key-id"
GRANTS = "https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html"
SCALING_ROLE = "autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
SPOT_ROLE = "spot.amazonaws.com/AWSServiceRoleForEC2Spot"
"""Spot instances are launched under a role of their own
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html)."""
GRANTED = (
    "Encrypt Decrypt ReEncryptFrom ReEncryptTo GenerateDataKey GenerateDataKeyWithoutPlaintext DescribeKey CreateGrant"
)
"""What a grant must hold (GRANTS)."""
NAMED_ARNS = (
    *(f"access.{key}" for key in ("permissions_boundary", "node_role", "instance_profile")),
    *(f"eks.{key}" for key in EKS_ROLES.values()),
)
"""Keys that hold an ARN of IAM."""
_KEY = re.compile(
    r"arn:(?P<partition>aws[a-z-]*):kms:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):"
    r"(?:key/(?:mrk-)?[0-9a-f-]{32,36}|alias/[A-Za-z0-9/_-]+)"
)
ROLE_CHARACTERS = 10_240
"""Of all policies that lie in a role (QUOTAS); ours is the only one."""
RULES = Family()


def _file_system_keys(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    for name, system in (("lustre", spec.storage.lustre), ("home", spec.storage.home)):
        if system and system.kms_key:
            yield f"storage.{name}.kms_key", system.kms_key


def _keys(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    yield from _file_system_keys(spec)
    if spec.buckets.kms_key:
        yield "buckets.kms_key", spec.buckets.kms_key
    for index, association in enumerate(spec.storage.lustre.associations if spec.storage.lustre else ()):
        if association.kms_key:
            yield association_key(index, "kms_key"), association.kms_key
    yield from _volume_keys(spec)


def _volume_keys(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    for path, group in groups(spec):
        if group.volume_kms_key:
            yield f"{path}.volume_kms_key", group.volume_kms_key


def _mount_keys(spec: ClusterSpec, context: Context) -> Iterator[tuple[str, str, str | None]]:
    """Yield path, key and region: a mounted bucket may be in another one than the cluster."""
    for index, mount in enumerate(spec.storage.s3_mounts):
        if mount.kms_key:
            yield f"storage.s3_mounts.{index}.kms_key", mount.kms_key, mount.region or context.region


@RULES.add("IAM-001", "KMS keys are named by their ARN, which alone every service takes.", KEYS)
def key_form(spec: ClusterSpec, context: Context) -> Problems:
    for path, key in [*_keys(spec), *((path, key) for path, key, _ in _mount_keys(spec, context))]:
        if not _KEY.fullmatch(key):
            fix = "write arn:aws:kms:<region>:<account>:key/<id>"
            yield finding(path, f"{key!r} is not the ARN of a KMS key", fix)


@RULES.add("IAM-002", "KMS keys are of the region of what they encrypt.", KEYS)
def key_region(spec: ClusterSpec, context: Context) -> Problems:
    for path, key in _keys(spec):
        match = _KEY.fullmatch(key)
        if match and context.region and match["region"] != context.region:
            message = f"the key is in {match['region']}, the cluster in {context.region}"
            yield finding(path, message, "use a key of the region, or a replica of a multi-Region key")
    for path, key, region in _mount_keys(spec, context):
        match = _KEY.fullmatch(key)
        if match and region and match["region"] != region:
            message = f"the key is in {match['region']}, the bucket in {region}"
            yield finding(path, message, "name the key that the bucket is encrypted with")


@RULES.add(
    "IAM-003",
    "Keys of file systems and volumes are not aliases: an alias may move to a new key, what is encrypted keeps the old one.",
    "https://docs.aws.amazon.com/fsx/latest/LustreGuide/encryption-at-rest.html",
    judgement=True,
)
def key_alias(spec: ClusterSpec, context: Context) -> Problems:
    fix = "write the ARN of the key that it names"
    for path, key in _file_system_keys(spec):
        if ":alias/" in key:
            yield finding(path, f"{key} is an alias, and the key of a file system cannot change", fix)
    for path, key in _volume_keys(spec):
        if ":alias/" in key:
            yield finding(path, f"{key} is an alias, and roles and grants are given for a key", fix)


@RULES.add("IAM-004", "ARNs are of the partition that the cluster is in (aws, aws-cn, aws-us-gov).", ARNS)
def partition(spec: ClusterSpec, context: Context) -> Problems:
    plans = [(f"groups.{i}.capacity.training_plan", g.capacity.training_plan) for i, g in enumerate(spec.groups)]
    roles = [(f"access.admin_roles.{i}", arn) for i, arn in enumerate(spec.access.admin_roles)]
    secrets = [("slurm.accounting.secret_arn", one.secret_arn)] if (one := spec.slurm.accounting) else []
    if arn := accounting_secret(spec):
        secrets.append(("scheduler.accounting.database.secret_arn", arn))
    for path, arn in [*plans, *roles, *secrets, *_named_arns(spec), *_keys(spec)]:
        partition = Arn.parse(arn).partition if arn and arn.startswith("arn:") else None
        if context.partition and partition and partition != context.partition:
            message = f"the ARN is of partition {partition}, the cluster of {context.partition}"
            yield finding(path, message, f"write arn:{context.partition}:…")


@RULES.add(
    "IAM-005",
    "Administrators are roles that EKS knows, each named once, not a session of one or a service's own.",
    "https://docs.aws.amazon.com/eks/latest/userguide/creating-access-entries.html",
)
def session_role(spec: ClusterSpec, context: Context) -> Problems:
    here, roles = "access.admin_roles", spec.access.admin_roles
    yield from named_twice(here, roles)
    for index, arn in enumerate(roles):
        if ":role/aws-service-role/" in arn:
            yield finding(
                f"{here}.{index}", "is a service-linked role, which gets no access entry", "name a role of your own"
            )


@RULES.add(
    "IAM-006",
    "The login user is a Linux user's name, and not root.",
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/managing-users.html",
    judgement=True,
)
def login_user(spec: ClusterSpec, context: Context) -> Problems:
    user = spec.access.user
    if user == "root" or not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", user):
        yield finding("access.user", f"{user!r} cannot log in", "write ubuntu, ec2-user or another user of the image")


@RULES.add(
    "IAM-007",
    "On EC2, Auto Scaling may use the KMS key of the volumes: it launches nodes under a role of its own.",
    GRANTS,
    level="warning",
)
def key_of_auto_scaling(spec: ClusterSpec, context: Context) -> Problems:
    if spec.backend != "ec2":
        return
    for path, group in groups(spec):
        key, capacity = group.volume_kms_key, group.capacity
        launching = {
            SPOT_ROLE: capacity.mode == "spot",
            SCALING_ROLE: capacity.mode != "spot" or capacity.on_demand_base,
        }
        for who in (role for role, launches in launching.items() if key and launches):
            role = context.place.arn("iam", f"role/aws-service-role/{who}", region="")
            message = f"nodes end at launch unless {who.rpartition('/')[2]} may use {key}"
            made = f"aws kms create-grant --key-id {key} --grantee-principal {role} --operations {GRANTED}"
            yield finding(f"{path}.volume_kms_key", message, f"{made}; then suppress this")


@RULES.add(
    "IAM-008",
    "A permissions boundary and existing roles are of the cluster's account; a boundary may be AWS's own.",
    "https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html",
)
def account_of_arns(spec: ClusterSpec, context: Context) -> Problems:
    for path, arn in _named_arns(spec):
        owner = Arn.parse(arn).account
        if context.account and owner not in ("aws", context.account):
            message = f"is of account {owner}, the cluster of {context.account}"
            yield finding(path, message, "name one of the cluster's account")


def _named_arns(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    for path in NAMED_ARNS:
        section, _, key = path.partition(".")
        if arn := getattr(getattr(spec, section), key):
            yield path, arn


@RULES.add(
    "IAM-009",
    "On EC2 an existing role of the nodes comes with the instance profile that holds it, and the other way round.",
    "https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_switch-role-ec2_instance-profiles.html",
    essential=True,
)
def role_and_profile(spec: ClusterSpec, context: Context) -> Problems:
    access = spec.access
    if spec.backend != "ec2" or bool(access.node_role) == bool(access.instance_profile):
        return
    if access.node_role:
        message = "EC2 takes a role on through an instance profile, and none is named"
        yield finding("access.node_role", message, "set access.instance_profile to the one that holds this role")
    else:
        message = "the role that it holds is not named"
        yield finding("access.instance_profile", message, "set access.node_role to the role that it holds")


@RULES.add("IAM-010", "The policy of a role fits into the role: mounts and named buckets make it longer.", QUOTAS)
def policy_length(spec: ClusterSpec, context: Context) -> Problems:
    for plan in roles(spec, context.place):
        length = characters(plan.policy["Statement"]) if plan.policy else 0
        if length > ROLE_CHARACTERS:
            message = f"the policy of role {plan.key} has {length:,} characters; IAM takes {ROLE_CHARACTERS:,}"
            path = "storage.s3_mounts" if spec.storage.s3_mounts else "network.s3_buckets"
            yield finding(path, message, "name fewer buckets and prefixes, or whole buckets")
