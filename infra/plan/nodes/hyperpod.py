"""The desired state of one AWS::SageMaker::Cluster, SageMaker HyperPod.

Field names and limits follow the CloudFormation schema
(https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/aws-resource-sagemaker-cluster.html); tests hold
each desired state against that schema and against CreateCluster's model. Slurm is driven by the API (`Orchestrator.Slurm`,
`SlurmConfig`), not by a `provisioning_parameters.json` in the bundle
(https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-slurm-api-config-migration.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from infra.config import AccountingDatabase, ClusterSpec, Group, GroupRole
from infra.groups import DeepCheck
from infra.plan.nodes.bundle import ON_CREATE, ON_INIT
from infra.plan.place import tags

TYPE = "AWS::SageMaker::Cluster"
NODE_TYPES: dict[GroupRole, str] = {"controller": "Controller", "login": "Login", "worker": "Compute"}


@dataclass(frozen=True)
class Mount:
    """A Lustre file system as a client mounts it; Any, since the values may be Outputs."""

    dns_name: Any
    mount_name: Any
    path: str


@dataclass(frozen=True)
class HomeMount:
    """An OpenZFS file system as a client mounts it; the service mounts no EFS, which the lifecycle bundle does."""

    dns_name: Any
    path: str


@dataclass(frozen=True)
class Refs:
    """What other resources tell the cluster; Any, since the values may be Outputs.

    `lifecycle_uri` is the folder of one bundle, `eks_cluster_arn` is for `hyperpod-eks` only, `zone_subnet_ids` has the
    subnets of groups in other zones than the cluster's, by zone id.
    """

    role_arn: Any
    subnet_id: Any
    security_group_ids: Any
    lifecycle_uri: Any
    lustre: Mount | None = None
    home: HomeMount | None = None
    eks_cluster_arn: Any = None
    zone_subnet_ids: Mapping[str, Any] = field(default_factory=dict)
    cluster_role_arn: Any = None
    """`hyperpod-eks` only: of the role with which HyperPod's Karpenter adds and removes nodes."""


def desired_state(spec: ClusterSpec, refs: Refs) -> dict[str, Any]:
    """Return the cluster as JSON data; a key that has nothing to say is absent, never None."""
    return _present(
        {
            "ClusterName": spec.name,
            "NodeProvisioningMode": "Continuous",
            "NodeRecovery": "Automatic",
            "Orchestrator": orchestrator(spec, refs),
            "VpcConfig": {"SecurityGroupIds": refs.security_group_ids, "Subnets": [refs.subnet_id]},
            "TieredStorageConfig": tiered_storage(spec),
            **auto_scaling(spec, refs),
            "Tags": [{"Key": key, "Value": value} for key, value in sorted(tags(spec).items())],
            "InstanceGroups": [instance_group(spec, group, refs) for group in spec.groups],
        }
    )


def orchestrator(spec: ClusterSpec, refs: Refs) -> dict[str, Any]:
    if spec.backend == "hyperpod-eks":
        return {"Eks": {"ClusterArn": refs.eks_cluster_arn}}
    return {
        "Slurm": _present(
            {"SlurmConfigStrategy": spec.slurm.config_strategy, "AccountingDatabase": accounting(spec.slurm.accounting)}
        )
    }


def accounting(database: AccountingDatabase | None) -> dict[str, Any] | None:
    """Needs `NodeProvisioningMode` Continuous, which every cluster of ours has, and an AMI from after 2026-08-30."""
    if database is None:
        return None
    return _present(
        {
            "Endpoint": database.endpoint,
            "Port": database.port,
            "Name": database.name,
            "SecretArn": database.secret_arn,
        }
    )


def tiered_storage(spec: ClusterSpec) -> dict[str, Any] | None:
    """Checkpoints in the memory of the nodes, `hyperpod-eks` only."""
    percent = spec.eks.tiered_memory_percent
    if spec.backend != "hyperpod-eks" or percent is None:
        return None
    return {"Mode": "Enable", "InstanceMemoryAllocationPercentage": percent}


def auto_scaling(spec: ClusterSpec, refs: Refs) -> dict[str, Any]:
    """HyperPod's managed Karpenter and its role, `hyperpod-eks` only; it needs continuous provisioning and node recovery
    (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-autoscaling.html)."""
    if spec.backend != "hyperpod-eks" or spec.eks.karpenter is None:
        return {}
    if not spec.eks.karpenter:
        return {"AutoScaling": {"Mode": "Disable"}}
    return {"AutoScaling": {"Mode": "Enable", "AutoScalerType": "Karpenter"}, "ClusterRole": refs.cluster_role_arn}


def instance_group(spec: ClusterSpec, group: Group, refs: Refs) -> dict[str, Any]:
    eks = spec.backend == "hyperpod-eks"
    return _present(
        {
            "InstanceGroupName": group.name,
            "InstanceType": group.hyperpod_type,
            "InstanceCount": group.count,
            "MinInstanceCount": group.min_count,
            "ThreadsPerCore": group.threads_per_core,
            "ImageId": group.image_id,
            "NetworkInterface": {"InterfaceType": group.interface_type} if group.interface_type else None,
            "AutoPatchConfig": {"PatchingStrategy": group.auto_patch} if group.auto_patch else None,
            "ExecutionRole": refs.role_arn,
            "SlurmConfig": None if eks else slurm(group),
            "KubernetesConfig": kubernetes(group) if eks else None,
            "OnStartDeepHealthChecks": list(deep_checks(spec, group)) or None,
            "LifeCycleConfig": {
                "SourceS3Uri": refs.lifecycle_uri,
                "OnCreate" if eks else "OnInitComplete": entry(spec),
            },
            "InstanceStorageConfigs": storage(spec, group, refs),
            "OverrideVpcConfig": elsewhere(spec, group, refs),
            "TrainingPlanArn": group.capacity.training_plan if group.capacity.mode == "training-plan" else None,
            "CapacityRequirements": {"Spot": {}} if group.capacity.mode == "spot" else None,
        }
    )


def elsewhere(spec: ClusterSpec, group: Group, refs: Refs) -> dict[str, Any] | None:
    """Where a group lies that is not in the cluster's zone."""
    zone = spec.zone_of(group)
    if zone == spec.zone_id:
        return None
    return {"SecurityGroupIds": refs.security_group_ids, "Subnets": [refs.zone_subnet_ids[zone]]}


def entry(spec: ClusterSpec) -> str:
    """Return the file of the bundle that HyperPod runs on a node."""
    return ON_CREATE if spec.backend == "hyperpod-eks" else ON_INIT


def slurm(group: Group) -> dict[str, Any]:
    """Return the Slurm settings of a group: it is in one partition at most, and only workers are in one."""
    slurm: dict[str, Any] = {"NodeType": NODE_TYPES[group.role]}
    if group.role == "worker":
        slurm["PartitionNames"] = [group.slurm_partition]
    return slurm


def kubernetes(group: Group) -> dict[str, Any] | None:
    """Labels and taints that the service keeps on the nodes; a taint without a value leaves it out, as the schema wants."""
    taints = [_present({"Key": one.key, "Value": one.value or None, "Effect": one.effect}) for one in group.taints]
    return _present({"Labels": dict(group.labels) or None, "Taints": taints or None}) or None


def deep_checks(spec: ClusterSpec, group: Group) -> tuple[str, ...]:
    """Return the checks of a group's new nodes.

    They stress accelerators, so that a type without any gets none; the value for an unknown type is kept.
    """
    known = spec.type_of(group)
    if known and not known.accelerators:
        return ()
    if group.deep_health_checks is not None:
        return group.deep_health_checks
    return () if group.capacity.mode == "spot" or filled_by_karpenter(spec, group) else get_args(DeepCheck)


def filled_by_karpenter(spec: ClusterSpec, group: Group) -> bool:
    return spec.backend == "hyperpod-eks" and bool(spec.eks.karpenter) and not group.count


def storage(spec: ClusterSpec, group: Group, refs: Refs) -> list[dict[str, Any]]:
    """Return the group's EBS volume (on /opt/sagemaker) and, with Slurm, the file systems, which the service mounts before our
    script runs; pods on EKS get theirs from the CSI driver. The root disk is spoken of only to give it a key."""
    key = group.volume_kms_key
    requests: list[dict[str, Any]] = [
        {"EbsVolumeConfig": _present({"VolumeSizeInGB": group.root_volume_gib, "VolumeKmsKeyId": key})}
    ]
    if key:
        requests.insert(0, {"EbsVolumeConfig": {"RootVolume": True, "VolumeKmsKeyId": key}})
    if spec.backend == "hyperpod-eks":
        return requests
    if refs.lustre:
        lustre = refs.lustre
        mount = {"DnsName": lustre.dns_name, "MountName": lustre.mount_name, "MountPath": lustre.path}
        requests.append({"FsxLustreConfig": mount})
    if refs.home:
        requests.append({"FsxOpenZfsConfig": {"DnsName": refs.home.dns_name, "MountPath": refs.home.path}})
    return requests


def create_only(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a desired state that HyperPod never changes in a cluster that is there: the schema's
    createOnlyProperties."""
    return _present(
        {
            "ClusterName": state["ClusterName"],
            "VpcConfig": state.get("VpcConfig"),
            "Eks": state.get("Orchestrator", {}).get("Eks"),
        }
    )


def protected(spec: ClusterSpec) -> bool:
    """Whether Pulumi refuses to delete or replace the cluster: where a training plan, which is paid for, would stand empty.

    A cluster holds no data, and one on demand or on spot must be easy to end, since it is what costs.
    """
    return any(group.capacity.mode == "training-plan" for group in spec.groups)


def ssm_target(cluster_id: str) -> str:
    """Format of the SSM target of a node (`aws ssm start-session --target`); nodes lie in the service's account, EC2 does
    not list them."""
    return f"sagemaker-cluster:{cluster_id}_{{group}}-{{instance_id}}"


def _present(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}
