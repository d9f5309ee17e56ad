"""The roles of a cluster: who may take each on, and what it may do, as plain documents.

Roles lie under the path /lustrain/<cluster>/, so that whoever deploys needs a right on that path only. A resource of `*`
stands where AWS's service authorization reference knows no narrower one
(https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html).
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.config import ClusterSpec
from infra.plan.documents import Document, allow, document, trust
from infra.plan.iam_node import node_statements
from infra.plan.place import Place


@dataclass(frozen=True)
class RolePlan:
    """One role; `managed` are ARNs of AWS's own policies, `policy` is ours. EC2 takes a role on through a profile."""

    key: str
    path: str
    description: str
    trust: Document
    policy: Document | None = None
    managed: tuple[str, ...] = ()
    instance_profile: bool = False


def roles(spec: ClusterSpec, place: Place) -> tuple[RolePlan, ...]:
    """`node` always; with `hyperpod-eks` also `eks-cluster`, and `fsx-csi` where there is a Lustre file system."""
    if spec.backend == "ec2":
        return (_ec2_node(spec, place),)
    if spec.backend == "hyperpod-slurm":
        return (_hyperpod_node(spec, place),)
    driver = (_fsx_csi(spec, place),) if spec.storage.lustre else ()
    return (_hyperpod_node(spec, place), _eks_cluster(spec, place), *driver)


def role_path(spec: ClusterSpec) -> str:
    return f"/lustrain/{spec.name}/"


def flow_log_group(spec: ClusterSpec) -> str:
    """Known by name, so that the role can be held to it."""
    return f"/lustrain/{spec.name}/flow-logs"


def flow_log_role(spec: ClusterSpec, place: Place) -> RolePlan:
    """Lets VPC write flow logs into their log group
    (https://docs.aws.amazon.com/vpc/latest/userguide/flow-logs-iam-role.html)."""
    group = place.arn("logs", f"log-group:{flow_log_group(spec)}")
    condition = {
        "StringEquals": {"aws:SourceAccount": place.account},
        "ArnLike": {"aws:SourceArn": place.arn("ec2", "vpc-flow-log/*")},
    }
    write = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    return RolePlan(
        key="flow-logs",
        path=role_path(spec),
        description=f"VPC flow logs of {spec.name}",
        trust=trust("vpc-flow-logs", condition=condition),
        policy=document([allow("Write", write, [group, f"{group}:*"])]),
    )


def _ec2_node(spec: ClusterSpec, place: Place) -> RolePlan:
    return RolePlan(
        key="node",
        path=role_path(spec),
        description=f"Nodes of {spec.name}",
        trust=trust("ec2"),
        managed=(place.managed_policy("AmazonSSMManagedInstanceCore"),),
        policy=document(node_statements(spec, place)),
        instance_profile=True,
    )


def _hyperpod_node(spec: ClusterSpec, place: Place) -> RolePlan:
    """The managed policy has logs, metrics, SSM and lifecycle scripts in `sagemaker-…` buckets
    (https://docs.aws.amazon.com/sagemaker/latest/dg/security-iam-awsmanpol-AmazonSageMakerClusterInstanceRolePolicy.html)."""
    return RolePlan(
        key="node",
        path=role_path(spec),
        description=f"HyperPod nodes of {spec.name}",
        trust=trust("sagemaker"),
        managed=(place.managed_policy("AmazonSageMakerClusterInstanceRolePolicy"),),
        policy=document(node_statements(spec, place)),
    )


def _eks_cluster(spec: ClusterSpec, place: Place) -> RolePlan:
    """https://docs.aws.amazon.com/eks/latest/userguide/cluster-iam-role.html"""
    return RolePlan(
        key="eks-cluster",
        path=role_path(spec),
        description=f"EKS control plane of {spec.name}",
        trust=trust("eks"),
        managed=(place.managed_policy("AmazonEKSClusterPolicy"),),
    )


def _fsx_csi(spec: ClusterSpec, place: Place) -> RolePlan:
    """The driver mounts the cluster's own file system and makes none, so that it only looks; pods get the role through
    EKS Pod Identity (https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html)."""
    condition = {
        "StringEquals": {"aws:SourceAccount": place.account},
        "ArnEquals": {"aws:SourceArn": place.arn("eks", f"cluster/{spec.name}")},
    }
    return RolePlan(
        key="fsx-csi",
        path=role_path(spec),
        description=f"FSx CSI driver of {spec.name}",
        trust=trust("pods.eks", actions=("sts:AssumeRole", "sts:TagSession"), condition=condition),
        policy=document([allow("FsxLook", ["fsx:DescribeFileSystems"], "*")]),
    )
