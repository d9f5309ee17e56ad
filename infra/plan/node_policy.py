"""The permissions of a node, statement by statement: the trainer's S3, its file system, its queue, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.config import ClusterSpec
from infra.plan.documents import Location, Statement, allow, location
from infra.plan.nodes.auto_scaling import group_name
from infra.plan.nodes.controller import accounting_secret, secret_name
from infra.plan.nodes.logs import WRITE as WRITE_LOGS
from infra.plan.nodes.logs import carries_logs, group_arns
from infra.plan.place import COST_TAG, Place, bucket_names, ours, runs_uri
from infra.plan.storage import s3_mounts
from infra.plan.storage.buckets import EPHEMERAL, MILESTONE
from infra.plan.watch.interruptions import topic_name
from infra.plan.watch.machine import settings
from infra.plan.watch.monitor import monitor_actions

READ = ("s3:GetObject",)
WRITE = ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
"""What saving, pruning and resuming take (docs/checkpoints.md, "On S3")."""
PULL = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
READ_SECRET, WRITE_SECRET = "GetSecretValue", "PutSecretValue"
RUNS = "RunsReadWrite"
REQUESTS = ("launch/*", "sweep.json")
"""What `fab train`, `fab stop` and `fab sweep` write of a run or a sweep (trainer/run/journal.py, launch/sweep/record.py)."""
METRIC_NAMESPACES = ("CWAgent", "Lustrain")


def node_statements(spec: ClusterSpec, place: Place) -> list[Statement]:
    """Return the statements of a node's own policy, on top of the managed one that its backend has. A role of the user's is
    the controller's too."""
    statements = [*_s3(spec, place), *_kms(spec, place), *_common(spec, place)]
    if spec.backend == "ec2":
        written = [*_of_controller(spec, place)] if spec.access.node_role else ()
        return [*statements, *_ec2(spec, place), *_munge_key(spec, place, READ_SECRET), *written]
    statements += [*_hyperpod(place), *_volume_keys(spec), *_accounting(spec)]
    return [*statements, *_hyperpod_eks(spec, place)] if spec.backend == "hyperpod-eks" else statements


def controller_statements(spec: ClusterSpec, place: Place) -> list[Statement]:
    """Return the statements of Slurm's controller: it boots like a node, reads and writes runs, makes the munge key,
    logs into the database of Slurm's records, and scales groups that go to zero."""
    common = [*_s3(spec, place), *_kms(spec, place), *_common(spec, place)]
    return [*common, *_munge_key(spec, place, READ_SECRET), *_of_controller(spec, place)]


def _of_controller(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Yield what the controller does and nodes do not."""
    yield from _munge_key(spec, place, WRITE_SECRET)
    if secret := accounting_secret(spec):
        yield allow("AccountingSecret", [f"secretsmanager:{READ_SECRET}"], secret)
    yield from _scaling(spec, place)


def login_statements(spec: ClusterSpec, place: Place) -> list[Statement]:
    """Return the statements of a login: it boots, reads the munge key, and its users read what nodes may, and start and stop
    runs. It writes and deletes no checkpoint, reads no notice, fetches no image and touches no group of machines."""
    known = [statement for statement in _s3(spec, place) if statement["Sid"] != RUNS]
    read = [place.bucket_arn(each.bucket, f"{each.prefix}*") for each in written(spec, place)]
    runs = location(runs_uri(spec, place))
    requests = [place.bucket_arn(runs.bucket, f"{runs.prefix}*/{key}") for key in REQUESTS] if runs else []
    return [
        *known,
        allow("RunsRead", READ, read),
        *([allow("RunsRequest", ["s3:PutObject", "s3:DeleteObject"], requests)] if requests else []),
        *_kms(spec, place),
        # Nothing trains there.
        *_reported(spec, place, ["Lustrain"], without_groups=("train",)),
        *_munge_key(spec, place, READ_SECRET),
    ]


def monitor_statements(spec: ClusterSpec, place: Place) -> list[Statement]:
    """Return the statements of the monitor: its bundle, what its programs call, and the count of failed boots."""
    bucket = bucket_names(spec, place).lifecycle
    key = spec.buckets.kms_key
    subjects: dict[str, tuple[str, dict[str, dict[str, str]]]] = {
        "*": ("*", {}),
        "topic": (place.arn("sns", topic_name(spec)), {}),
        "workspace": (place.arn("aps", "workspace/*"), ours(spec)),
        "hyperpod_cluster": (place.arn("sagemaker", "cluster/*"), ours(spec)),
    }
    rights = monitor_actions(settings(spec, place))
    return [
        allow("LifecycleList", ["s3:ListBucket"], place.bucket_arn(bucket)),
        allow("LifecycleRead", READ, place.bucket_arn(bucket, "*")),
        *([_bucket_key("BucketKey", key, place, place.region, written=False)] if key else []),
        allow("Metrics", ["cloudwatch:PutMetricData"], "*", {"StringEquals": {"cloudwatch:namespace": "Lustrain"}}),
        *(allow(right.sid, right.actions, *subjects[right.subject]) for right in rights),
    ]


def _munge_key(spec: ClusterSpec, place: Place, action: str) -> Iterator[Statement]:
    if spec.controller:
        secret = place.arn("secretsmanager", f"secret:{secret_name(spec)}-*")
        yield allow(f"MungeKey{action.removesuffix('SecretValue')}", [f"secretsmanager:{action}"], secret, ours(spec))


def _scaling(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Yield what sets the size of the groups that go to zero, and of no other group."""
    names = [group_name(spec, group) for group in spec.workers if spec.goes_to_zero(group)]
    if not names:
        return
    arns = [place.arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{name}-gang-*") for name in names]
    own = {"StringEquals": {f"autoscaling:ResourceTag/{COST_TAG}": spec.name}}
    sizes = ["SetDesiredCapacity", "SetInstanceProtection", "TerminateInstanceInAutoScalingGroup"]
    yield allow("Scale", [f"autoscaling:{action}" for action in sizes], arns, own)
    look = ["autoscaling:DescribeAutoScalingGroups", "autoscaling:DescribeScalingActivities"]
    yield allow("ScaleLook", [*look, "ec2:DescribeInstances"], "*")


def written(spec: ClusterSpec, place: Place) -> tuple[Location, ...]:
    """Where the trainer writes: the runs, and in the checkpoints bucket what expires soon or is kept for long."""
    checkpoints = bucket_names(spec, place).checkpoints
    prefixes = dict.fromkeys((spec.buckets.runs_prefix, EPHEMERAL, MILESTONE))
    own = [Location(checkpoints, prefix) for prefix in prefixes]
    elsewhere = location(runs_uri(spec, place))
    return tuple(dict.fromkeys([*own, *([elsewhere] if elsewhere else [])]))


def _s3(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    names = bucket_names(spec, place)
    yield allow("DataList", ["s3:ListBucket"], place.bucket_arn(names.data))
    yield allow("DataRead", READ, place.bucket_arn(names.data, "*"))
    places = written(spec, place)
    for number, bucket in enumerate(dict.fromkeys(item.bucket for item in places)):
        prefixes = [entry.prefix for entry in places if entry.bucket == bucket]
        # The prefix itself too: a listing without a trailing star asks for exactly it.
        under = sorted(text for prefix in prefixes for text in (prefix, f"{prefix}*"))
        condition = {"StringLike": {"s3:prefix": under}}
        yield allow(f"RunsList{number}", ["s3:ListBucket"], place.bucket_arn(bucket), condition)
    objects = [place.bucket_arn(each.bucket, f"{each.prefix}*") for each in places]
    yield allow(RUNS, (*READ, *WRITE), objects)
    if further := spec.network.s3_buckets:
        yield allow("NamedList", ["s3:ListBucket"], [place.bucket_arn(bucket) for bucket in further])
        yield allow("NamedRead", READ, [place.bucket_arn(bucket, "*") for bucket in further])
    yield from s3_mounts.statements(spec, place)
    yield allow("LifecycleList", ["s3:ListBucket"], place.bucket_arn(names.lifecycle))
    yield allow("LifecycleRead", READ, place.bucket_arn(names.lifecycle, "*"))


def key_resource(key: str, place: Place) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """Resource and condition for the use of a key, given as its id, its ARN or an alias.

    A policy may not name an alias as the resource of such actions: it becomes a condition
    (https://docs.aws.amazon.com/kms/latest/developerguide/alias-authorization.html).
    """
    _, alias, name = key.rpartition("alias/")
    if alias:
        return place.arn("kms", "key/*"), {"ForAnyValue:StringEquals": {"kms:ResourceAliases": f"alias/{name}"}}
    return key if key.startswith("arn:") else place.arn("kms", f"key/{key}"), {}


def _kms(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Through S3 only."""
    if spec.buckets.kms_key:
        yield _bucket_key("BucketKey", spec.buckets.kms_key, place, place.region, written=True)
    for number, plan in enumerate(s3_mounts.s3_mounts(spec, place)):
        if plan.kms_key:
            yield _bucket_key(f"MountKey{number}", plan.kms_key, place, plan.region, written=not plan.read_only)


def _bucket_key(sid: str, key: str, place: Place, region: str, *, written: bool) -> Statement:
    arn, condition = key_resource(key, place)
    through = {"StringEquals": {"kms:ViaService": f"s3.{region}.{place.dns_suffix}"}}
    return allow(sid, ["kms:Decrypt", *(["kms:GenerateDataKey"] if written else [])], arn, {**condition, **through})


def _common(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    # Without it the check for EFA on a Lustre mount silently does nothing (awslabs/awsome-distributed-ai #1202).
    yield allow("FsxLook", ["fsx:DescribeFileSystems"], "*")
    queue = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueAttributes"]
    yield allow("Interruptions", queue, place.arn("sqs", f"{spec.name}-interruptions"))
    yield allow("EcrToken", ["ecr:GetAuthorizationToken"], "*")
    if repositories := _repositories(spec, place):
        yield allow("EcrPull", PULL, repositories)
    yield from _reported(spec, place, METRIC_NAMESPACES)


def _reported(
    spec: ClusterSpec, place: Place, namespaces: Sequence[str], *, without_groups: Sequence[str] = ()
) -> Iterator[Statement]:
    """Yield the rights to logs, and to metrics such as that of a failed boot."""
    if carries_logs(spec) and spec.backend != "hyperpod-eks":  # where pods have a role for it
        yield allow("Logs", WRITE_LOGS, group_arns(spec, place, without=without_groups))
    namespace = {"StringEquals": {"cloudwatch:namespace": list(namespaces)}}
    yield allow("Metrics", ["cloudwatch:PutMetricData"], "*", namespace)


def _repositories(spec: ClusterSpec, place: Place) -> str:
    """Return the cluster's repository, or the one behind a URL like
    123456789012.dkr.ecr.us-east-1.amazonaws.com/team/trainer; empty for a registry that is not ECR."""
    if spec.repository.existing is None:
        return place.arn("ecr", f"repository/{spec.name}/*")
    host, _, name = spec.repository.existing.removeprefix("https://").partition("/")
    account, ecr, rest = host.partition(".dkr.ecr.")
    if not ecr:
        return ""
    return place.arn("ecr", f"repository/{name.partition(':')[0]}", region=rest.partition(".")[0], account=account)


def _ec2(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    # Ranks are ordered by network topology, and peers are found by tag.
    look = ["ec2:DescribeInstances", "ec2:DescribeTags", "ec2:DescribeInstanceTopology"]
    yield allow("PeersLook", look, "*")
    own = {"StringEquals": {f"autoscaling:ResourceTag/{COST_TAG}": spec.name}}
    groups = place.arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{spec.name}-*")
    # A node that saved its checkpoint lets the group go on, or asks for more time; one that is broken says so.
    hooks = ["CompleteLifecycleAction", "RecordLifecycleActionHeartbeat", "SetInstanceHealth"]
    yield allow("Gang", [f"autoscaling:{action}" for action in hooks], groups, own)


def _hyperpod(place: Place) -> Iterator[Statement]:
    """HyperPod's nodes stand in an account of the service and reach into our VPC by interfaces that they make
    (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-prerequisites-iam.html)."""
    interface, instance = place.arn("ec2", "network-interface/*"), place.arn("ec2", "instance/*", account="*")
    here = [interface, place.arn("ec2", "subnet/*"), place.arn("ec2", "security-group/*")]
    yield allow("EniMake", ["ec2:CreateNetworkInterface"], here)
    permissions = ["ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterfacePermission"]
    yield allow("EniUse", [*permissions, "ec2:DeleteNetworkInterface"], interface)
    yield allow("EniDetach", ["ec2:DetachNetworkInterface"], [interface, instance])
    yield allow("EniTag", ["ec2:CreateTags"], interface)
    kinds = ("NetworkInterfaces", "Vpcs", "DhcpOptions", "Subnets", "SecurityGroups")
    yield allow("VpcLook", [f"ec2:Describe{kind}" for kind in kinds], "*")


def _accounting(spec: ClusterSpec) -> Iterator[Statement]:
    """Let the controller read its database's secret: slurmdbd logs into a database of the user's; AWS's page names no
    other role that could read it."""
    if spec.backend == "hyperpod-slurm" and spec.slurm.accounting:
        yield allow("AccountingSecret", ["secretsmanager:GetSecretValue"], spec.slurm.accounting.secret_arn)


def _volume_keys(spec: ClusterSpec) -> Iterator[Statement]:
    """HyperPod encrypts volumes with the rights of the nodes' role
    (https://docs.aws.amazon.com/sagemaker/latest/dg/smcluster-cmk.html); EC2 with those of Auto Scaling, see IAM-007."""
    if keys := sorted({group.volume_kms_key for group in spec.groups if group.volume_kms_key}):
        yield allow("VolumeKeys", ["kms:CreateGrant", "kms:DescribeKey"], keys)


def _hyperpod_eks(spec: ClusterSpec, place: Place) -> Iterator[Statement]:
    """Yield what the VPC CNI and Pod Identity do on a node, and the images of EKS's add-ons, which lie in AWS's own accounts
    (https://docs.aws.amazon.com/eks/latest/userguide/add-ons-images.html)."""
    interface, instance = place.arn("ec2", "network-interface/*"), place.arn("ec2", "instance/*", account="*")
    pods = ["ec2:AssignPrivateIpAddresses", "ec2:UnassignPrivateIpAddresses"]
    yield allow("PodAddresses", pods, interface)
    attach = ["ec2:AttachNetworkInterface", "ec2:ModifyNetworkInterfaceAttribute"]
    yield allow("EniAttach", attach, [interface, instance, place.arn("ec2", "security-group/*")])
    yield allow(
        "EniAttachHyperPod", ["sagemaker:AttachClusterNodeNetworkInterface"], place.arn("sagemaker", "cluster/*")
    )
    look = ["ec2:DescribeInstances", "ec2:DescribeInstanceTypes", "ec2:DescribeTags"]
    yield allow("NodesLook", look, "*")
    yield allow("PodIdentity", ["eks-auth:AssumeRoleForPodIdentity"], place.arn("eks", f"cluster/{spec.eks_name}"))
    yield allow("EcrPullAddons", PULL, place.arn("ecr", "repository/*", account="*"))
    yield allow("AlarmsLook", ["cloudwatch:DescribeAlarms"], place.arn("cloudwatch", "alarm:*"))
