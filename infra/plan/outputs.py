"""The output `cluster` of a stack: the Cluster contract, from the plan and from the ids that AWS gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infra.config import ClusterSpec
from infra.plan.nodes.document import file_system, home_system, node_groups, tuning
from infra.plan.nodes.hyperpod import ssm_target
from infra.plan.stack import Plan
from lustrain.cluster import Access, BucketNames, Capacity, Cluster, Kubernetes, Nodes, S3Mount, Slurm

HYPERPOD_NODES = "sagemaker.amazonaws.com/compute-type=hyperpod"
"""Label on every HyperPod node in Kubernetes
(https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-operate-console-ui-access.html)."""


@dataclass(frozen=True)
class DeployedIds:
    """Ids and names that exist only after the deployment; empty or None where the spec asks for no such thing."""

    auto_scaling_groups: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    controller: str | None = None
    """Private address of Slurm's controller on EC2."""
    hyperpod_name: str | None = None
    hyperpod_id: str | None = None
    eks_name: str | None = None
    lustre: Mapping[str, str] | None = None
    """`id`, `dns_name`, `mount_name`."""
    home: Mapping[str, str] | None = None
    """`id`, `dns_name`."""
    buckets: Mapping[str, str] | None = None
    role_arn: str | None = None
    queue_url: str | None = None
    log_group: str | None = None
    repository: str | None = None


def cluster(plan: Plan, made: DeployedIds) -> Cluster:
    """Return the contract that `pulumi stack output cluster --json` prints."""
    spec = plan.spec
    return Cluster(
        name=spec.name,
        backend=spec.backend,
        region=plan.place.region,
        zone_id=spec.zone_id,
        nodes=Nodes(
            auto_scaling_groups=made.auto_scaling_groups,
            instances=made.instances,
            hyperpod_cluster=made.hyperpod_name,
            kubernetes_label=HYPERPOD_NODES if made.eks_name else None,
        ),
        reach=Access(
            via="ssm",
            user=spec.access.user,
            ssm_target=ssm_target(made.hyperpod_id) if made.hyperpod_id else "{instance_id}",
        ),
        groups=node_groups(spec),
        tuning=tuning(spec),
        lustre=file_system(spec, made.lustre) if made.lustre else None,
        home=home_system(spec, made.home) if made.home else None,
        s3_mounts=tuple(S3Mount(path=one.path, bucket=one.bucket, prefix=one.prefix) for one in plan.s3_mounts),
        buckets=BucketNames(**(made.buckets or {})),
        runs_uri=plan.runs_uri,
        capacity=_capacity(spec),
        slurm=_slurm(spec, made),
        kubernetes=_kubernetes(plan, made),
        image_repository=made.repository,
        role_arn=made.role_arn,
        interruption_queue=made.queue_url,
        log_group=made.log_group,
        prometheus_port=plan.monitor.settings.trainer_port if plan.monitor else None,
        kubernetes_cluster=made.eks_name,
    )


def _slurm(spec: ClusterSpec, made: DeployedIds) -> Slurm | None:
    if spec.controller and spec.scheduler:
        wanted = spec.scheduler
        return Slurm(
            controller_group=spec.controller.name,
            account=wanted.account,
            qos=wanted.qos,
            controller=made.controller,
            settings=wanted.settings,
        )
    if spec.backend != "hyperpod-slurm":
        return None
    return Slurm(controller_group=next((group.name for group in spec.groups if group.role == "controller"), None))


def _kubernetes(plan: Plan, made: DeployedIds) -> Kubernetes | None:
    """Name the context that `aws eks update-kubeconfig` makes.

    https://docs.aws.amazon.com/cli/latest/reference/eks/update-kubeconfig.html
    """
    return Kubernetes(context=plan.place.arn("eks", f"cluster/{made.eks_name}")) if made.eks_name else None


def _capacity(spec: ClusterSpec) -> Capacity:
    modes = {group.capacity.mode for group in spec.workers}
    return Capacity(mode=modes.pop() if len(modes) == 1 else "mixed", ends_at=spec.ends_at)
