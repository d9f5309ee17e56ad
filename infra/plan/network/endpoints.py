"""VPC endpoints: S3 through a gateway always, and in a closed network an interface for each service that nodes call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.config import ClusterSpec
from infra.plan.documents import Document, allow, document, location
from infra.plan.place import Place, bucket_names, runs_uri
from infra.plan.storage.s3_mounts import READ, WRITE, s3_mounts

ALWAYS = ("ec2", "ecr.api", "ecr.dkr", "sts", "logs", "monitoring", "ssm", "ssmmessages", "ec2messages", "fsx", "sqs")
"""Image pulls, credentials, logs and metrics, SSM sessions, the file system's state, and the interruption queue."""
BY_BACKEND = {
    "ec2": ("autoscaling",),
    "hyperpod-slurm": ("sagemaker.api",),
    "hyperpod-eks": ("sagemaker.api", "eks", "eks-auth"),
}
CHINESE = frozenset(
    {"autoscaling", "ec2", "ecr.api", "ecr.dkr", "eks", "fsx", "monitoring", "sagemaker.api", "sqs", "sts"}
)
"""In China these are called `cn.com.amazonaws.…`, the others as anywhere (aws-cdk's `getDefaultEndpointPrefix`,
https://github.com/aws/aws-cdk/blob/main/packages/aws-cdk-lib/aws-ec2/lib/vpc-endpoint.ts)."""


KEYS_REGION = "us-east-1"
"""Of the bucket without a region in its name, which alone is known to hold the key of the CloudWatch agent's packages."""


@dataclass(frozen=True)
class EndpointPlan:
    """One endpoint: a gateway lies in the route tables, an interface in the compute subnet."""

    key: str
    service: str
    kind: Literal["Gateway", "Interface"]
    policy: Document | None = None


def interface_services(spec: ClusterSpec) -> tuple[str, ...]:
    """Services that a closed network of ours has interfaces for; none in an open one or in one that is there already."""
    if spec.network.existing is not None or not spec.network.closed:
        return ()
    return needed_services(spec)


def needed_services(spec: ClusterSpec) -> tuple[str, ...]:
    """Services that nodes talk to, S3 aside."""
    prometheus = ("aps-workspaces",) if spec.observability.prometheus == "amp" else ()
    alerts = ("sns",) if spec.observability.prometheus == "self" and spec.monitor else ()
    accounting = spec.backend == "hyperpod-slurm" and spec.slurm.accounting
    secrets = ("secretsmanager",) if accounting or spec.controller else ()
    return (*ALWAYS, *BY_BACKEND[spec.backend], *prometheus, *alerts, *secrets)


def endpoints(spec: ClusterSpec, place: Place) -> tuple[EndpointPlan, ...]:
    """None in a network that is there already: nothing in it is changed."""
    if spec.network.existing is not None:
        return ()
    gateway = EndpointPlan("s3", f"com.amazonaws.{place.region}.s3", "Gateway", s3_policy(spec, place))
    return (gateway, *(_interface(service, place) for service in interface_services(spec)))


def s3_policy(spec: ClusterSpec, place: Place) -> Document:
    """Return what may pass the gateway. Every request from the VPC to S3 in this region does, also where there is a NAT
    gateway, and one that the policy does not name answers AccessDenied.

    An open network lets all pass: layers of quay.io and Docker Hub, public data sets and presigned URLs lie in buckets that
    cannot be listed, and data could leave through NAT anyway. Only the policy of a closed network keeps data from being copied
    to foreign buckets with foreign credentials; roles and bucket policies decide who may touch the cluster's own. Full access
    is spelled out, since the provider keeps the old policy of a network that was closed before.

    A closed one admits the cluster's own buckets, those that the spec names (`network.s3_buckets`, `storage.s3_mounts`), and
    public ones that nodes install from and pull images from.
    """
    if not spec.network.closed:
        return document([allow("Everything", ["*"], "*", Principal="*")])
    names = bucket_names(spec, place)
    runs = location(runs_uri(spec, place))
    buckets = {names.data, names.checkpoints, names.lifecycle, *([runs.bucket] if runs else [])}
    own = [place.bucket_arn(bucket, key) for bucket in buckets for key in ("", "*")]
    public = [*aws_buckets(place.region), *(kubernetes_buckets(place.region) if spec.backend == "hyperpod-eks" else ())]
    foreign = [place.bucket_arn(bucket, "*") for bucket in public]
    statements = [
        allow("ClusterBuckets", ["s3:*"], own, Principal="*"),
        allow("BucketsOfAws", ["s3:GetObject"], foreign, Principal="*"),
    ]
    if further := spec.network.s3_buckets:
        named = [place.bucket_arn(bucket, key) for bucket in further for key in ("", "*")]
        statements.append(allow("NamedBuckets", ["s3:ListBucket", "s3:GetObject"], named, Principal="*"))
    mounts = [plan for plan in s3_mounts(spec, place) if plan.bucket not in buckets]
    if mounts:
        arns = [place.bucket_arn(bucket, key) for bucket in {plan.bucket for plan in mounts} for key in ("", "*")]
        statements.append(allow("MountedBuckets", ["s3:ListBucket", *READ], arns, Principal="*"))
    if written := [place.bucket_arn(plan.bucket, f"{plan.prefix}*") for plan in mounts if not plan.read_only]:
        statements.append(allow("WrittenMounts", WRITE, written, Principal="*"))
    return document(statements)


def aws_buckets(region: str) -> tuple[str, ...]:
    """Buckets of AWS that nodes read.

    ECR's image layers (https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html), those of the SSM agent
    (https://docs.aws.amazon.com/systems-manager/latest/userguide/ssm-agent-technical-details.html), of the CloudWatch
    agent, of Amazon Linux' packages (https://docs.aws.amazon.com/linux/al2023/ug/network-considerations.html), the EFA
    installer (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html) and the Lustre client
    (https://docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html). What HyperPod's own agents read is not
    published; they run before lifecycle scripts and have an interface in AWS's network.
    """
    return (
        f"prod-{region}-starport-layer-bucket",
        f"aws-ssm-{region}",
        f"amazon-ssm-{region}",
        f"amazon-ssm-packages-{region}",
        f"aws-ssm-document-attachments-{region}",
        f"aws-ssm-distributor-file-{region}",
        f"patch-baseline-snapshot-{region}",
        f"{region}-birdwatcher-prod",
        f"amazoncloudwatch-agent-{region}",
        *(("amazoncloudwatch-agent",) if region == KEYS_REGION else ()),
        f"al2023-repos-{region}-de612dc2",
        f"amazonlinux-2-repos-{region}",
        "aws-efa-installer",
        "fsx-lustre-client-repo",
        "fsx-lustre-client-repo-public-keys",
    )


def kubernetes_buckets(region: str) -> tuple[str, ...]:
    """Where registry.k8s.io sends nodes for an image's layers; where the region has none it names another region's, which the
    gateway does not carry (https://github.com/kubernetes/k8s.io/issues/4214)."""
    return (f"prod-registry-k8s-io-{region}",)


def _interface(service: str, place: Place) -> EndpointPlan:
    prefix = "cn.com.amazonaws" if place.partition == "aws-cn" and service in CHINESE else "com.amazonaws"
    return EndpointPlan(service.replace(".", "-"), f"{prefix}.{place.region}.{service}", "Interface")
