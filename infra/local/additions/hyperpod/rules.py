"""What HyperPod checks of a cluster against the rest of the account, and which members of its request go together.

Rules that preflight has and that need nothing of the account are not repeated here.

Sources: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateCluster.html and the shapes beside it, and
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-prerequisites.html. The service detects some
violations later: a missing script or a role that it cannot assume fails the cluster minutes after it was accepted. The
embedded AWS refuses all of them at once with a ValidationException.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from moto.eks.models import eks_backends

from infra.local.additions import lookups
from infra.local.additions.serving import Call, refuse

Spec = Mapping[str, Any]


def check(call: Call, cluster: Spec) -> None:
    """Refuse a cluster that HyperPod would not make or keep; `cluster` has the members of CreateCluster's request."""
    groups: Sequence[Spec] = cluster.get("InstanceGroups") or []
    if cluster.get("RestrictedInstanceGroups"):
        _reject("The embedded AWS makes no restricted instance groups.")
    _check_orchestrator(call, cluster, groups)
    for config in _networks(cluster, groups):
        lookups.find_vpc(call, config["Subnets"], config["SecurityGroupIds"], _reject)
    for group in groups:
        _check_group(call, cluster, group)


def _networks(cluster: Spec, groups: Sequence[Spec]) -> Iterator[Mapping[str, Any]]:
    for owner, name in ((cluster, "VpcConfig"), *((group, "OverrideVpcConfig") for group in groups)):
        if owner.get(name):
            yield owner[name]


def _check_orchestrator(call: Call, cluster: Spec, groups: Sequence[Spec]) -> None:
    orchestrator = cluster.get("Orchestrator")
    if orchestrator is not None and len(orchestrator) != 1:
        _reject("Orchestrator must have exactly one of Eks and Slurm.")
    eks, slurm = (orchestrator or {}).get("Eks"), (orchestrator or {}).get("Slurm")
    if eks is not None:
        _check_eks(call, cluster, eks["ClusterArn"])
    for group in groups:
        name = group["InstanceGroupName"]
        if group.get("SlurmConfig") and slurm is None:
            _reject(f"Instance group {name} has a SlurmConfig, but the orchestrator of the cluster is not Slurm.")
        if group.get("KubernetesConfig") and eks is None:
            _reject(f"Instance group {name} has a KubernetesConfig, but the orchestrator of the cluster is not EKS.")
        if slurm is not None and not group.get("SlurmConfig"):
            _reject(f"Instance group {name} needs a SlurmConfig in a cluster whose orchestrator is Slurm.")
    if slurm is not None:
        _check_slurm(groups)
    if cluster.get("TieredStorageConfig") and eks is None:
        _reject("TieredStorageConfig is supported in clusters whose orchestrator is EKS only.")
    if (cluster.get("AutoScaling") or {}).get("Mode") == "Enable":
        _check_scaling(call, cluster, eks is not None)


def _check_scaling(call: Call, cluster: Spec, on_eks: bool) -> None:
    """https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-autoscaling.html"""
    if not on_eks:
        _reject("AutoScaling is supported in clusters whose orchestrator is EKS only.")
    role = cluster.get("ClusterRole")
    if not role or not lookups.role_trusts(call, role, "hyperpod.sagemaker.amazonaws.com"):
        _reject(f"Could not assume role {role}: it must exist and trust hyperpod.sagemaker.amazonaws.com.")


def _check_eks(call: Call, cluster: Spec, arn: str) -> None:
    eks_cluster = next(
        (candidate for candidate in eks_backends[call.account][call.region].clusters.values() if candidate.arn == arn),
        None,
    )
    if eks_cluster is None:
        _reject(f"The EKS cluster {arn} does not exist.")
    if eks_cluster.status != "ACTIVE":
        _reject(f"The EKS cluster {arn} is {eks_cluster.status}; it must be ACTIVE.")
    mode = (getattr(eks_cluster, "access_config", None) or {}).get("authenticationMode", "CONFIG_MAP")
    if mode not in ("API", "API_AND_CONFIG_MAP"):
        _reject(f"The authentication mode of the EKS cluster is {mode}; HyperPod needs API or API_AND_CONFIG_MAP.")
    if not cluster.get("VpcConfig"):
        _reject("VpcConfig is required for clusters whose orchestrator is EKS.")
    # Nodes join from subnets of the cluster's VPC (https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html).
    vpc = eks_cluster.resources_vpc_config.get("vpcId")
    for subnet_id in cluster["VpcConfig"]["Subnets"]:
        subnet = lookups.find_subnet(call, subnet_id)
        if vpc and subnet is not None and subnet.vpc_id != vpc:
            _reject(f"Subnet {subnet_id} is not in the VPC {vpc} of the EKS cluster {arn}.")


def _check_slurm(groups: Sequence[Spec]) -> None:
    controllers = [group for group in groups if group["SlurmConfig"]["NodeType"] == "Controller"]
    if len(controllers) != 1 or controllers[0]["InstanceCount"] != 1:
        _reject("A Slurm cluster needs exactly one instance group of node type Controller, with one instance.")
    for group in groups:
        slurm = group["SlurmConfig"]
        if slurm.get("PartitionNames") and slurm["NodeType"] != "Compute":
            _reject(f"PartitionNames of instance group {group['InstanceGroupName']} are for node type Compute only.")


def _check_group(call: Call, cluster: Spec, group: Spec) -> None:
    name = group["InstanceGroupName"]
    if not group.get("InstanceType") or group.get("InstanceRequirements"):
        _reject(
            f"Instance group {name} must have exactly one of InstanceType and InstanceRequirements; here the first."
        )
    if group.get("CapacityRequirements", {}).get("Spot") is not None and (
        cluster.get("NodeProvisioningMode") != "Continuous" or "Eks" not in (cluster.get("Orchestrator") or {})
    ):
        _reject(f"Spot capacity of instance group {name} needs orchestrator EKS and NodeProvisioningMode Continuous.")
    if not lookups.role_trusts(call, group["ExecutionRole"], "sagemaker.amazonaws.com"):
        _reject(
            f"Could not assume role {group['ExecutionRole']}. Please ensure that the role exists and allows principal "
            "'sagemaker.amazonaws.com' to assume the role."
        )
    _check_scripts(call, name, group.get("LifeCycleConfig"))
    for key in _volume_keys(group).values():
        if not lookups.is_key_usable(call, key):
            _reject(f"The KMS key {key} of instance group {name} does not exist or is not enabled.")


def _check_scripts(call: Call, name: str, config: Spec | None) -> None:
    if not config:
        return
    uri = config.get("SourceS3Uri", "")
    scripts = [config[entry] for entry in ("OnCreate", "OnInitComplete") if config.get(entry)]
    if len(scripts) != 1:
        _reject(f"LifeCycleConfig of instance group {name} must have exactly one of OnCreate and OnInitComplete.")
    if not uri.startswith("s3://sagemaker-"):
        _reject(f"Validation Error: SourceS3Uri '{uri}' does not start with 's3://sagemaker-'.")
    bucket, _, folder = uri.removeprefix("s3://").partition("/")
    key = f"{folder.rstrip('/')}/{scripts[0]}".lstrip("/")
    if not lookups.object_exists(call, bucket, key):
        _reject(f"Lifecycle scripts did not run successfully: s3://{bucket}/{key} does not exist.")


def _volume_keys(group: Spec) -> dict[bool, str]:
    """Return the KMS keys of a group's volumes; the key is True for the root volume."""
    volumes = [
        volume["EbsVolumeConfig"] for volume in group.get("InstanceStorageConfigs") or [] if "EbsVolumeConfig" in volume
    ]
    return {
        bool(volume.get("RootVolume")): volume["VolumeKmsKeyId"] for volume in volumes if volume.get("VolumeKmsKeyId")
    }


def check_change(current: Spec, desired: Spec) -> None:
    """Refuse changes that HyperPod does not make in place."""
    groups = {group["InstanceGroupName"]: group for group in desired.get("InstanceGroups") or []}
    for group in current.get("InstanceGroups") or []:
        updated = groups.get(group["InstanceGroupName"])
        if updated and group.get("InstanceType") != updated.get("InstanceType"):
            _reject(f"The InstanceType of instance group {group['InstanceGroupName']} cannot be changed.")
        if updated and _volume_keys(group) != _volume_keys(updated):
            _reject(f"The KMS keys of instance group {group['InstanceGroupName']} cannot be changed.")


def _reject(message: str, **details: str) -> NoReturn:
    refuse("ValidationException", message, **details)
