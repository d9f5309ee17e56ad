"""The roles of a cluster: their trust and their permissions, as plain documents.

Roles lie under the path lustrain/<cluster>/, so that the deployer needs a right on that path only. A resource of `*`
stands where AWS's service authorization reference knows no narrower one
(https://docs.aws.amazon.com/service-authorization/latest/reference/reference_policies_actions-resources-contextkeys.html).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from infra.config import CONTROLLER, LOGIN, MONITOR, ClusterSpec
from infra.plan.documents import Document, Statement, allow, document, trust
from infra.plan.node_policy import controller_statements, login_statements, monitor_statements, node_statements
from infra.plan.nodes.eks import (
    CLUSTER_ROLE,
    CSI_ROLE,
    KARPENTER_ROLE,
    LOGS_ROLE,
    METRICS_ROLE,
    OPERATOR_ROLE,
    pod_identities,
)
from infra.plan.nodes.logs import WRITE, write_policy
from infra.plan.place import Place, ours
from infra.plan.watch import grafana as managed_grafana

GRANTED = (
    "CreateGrant",
    "Decrypt",
    "DescribeKey",
    "GenerateDataKeyWithoutPlaintext",
    "ReEncryptFrom",
    "ReEncryptTo",
    "RetireGrant",
)
"""What a grant for the volumes of Karpenter's nodes may hold, as AWS's page of its role says."""


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
    boundary: str | None = None
    """ARN of the managed policy that bounds what the role may do."""
    existing: str | None = None
    """ARN of a role of the user's that is used as it is, in place of this one; this plan then says what it needs."""
    existing_profile: str | None = None
    """ARN of the instance profile that holds it."""


EKS_ROLES = {
    CLUSTER_ROLE: "cluster_role",
    CSI_ROLE: "storage_role",
    OPERATOR_ROLE: "operator_role",
    METRICS_ROLE: "metrics_role",
    KARPENTER_ROLE: "karpenter_role",
    LOGS_ROLE: "logs_role",
}
"""Key under `eks` of an existing role, by the key of its plan."""


def roles(spec: ClusterSpec, place: Place) -> tuple[RolePlan, ...]:
    """`node` always; with a scheduler also `controller`, and `login` where there are logins, unless nodes have a role of the
    user's, which then is theirs too; `monitor` where there is one; `grafana` for a managed one; with `hyperpod-eks` also one
    for the control plane that the stack makes, and for each chosen part that needs one."""
    grafana = [_grafana(spec, place)] if spec.observability.grafana == "managed" else []
    return (*_of_backend(spec, place), *grafana)


def _of_backend(spec: ClusterSpec, place: Place) -> tuple[RolePlan, ...]:
    if spec.backend != "hyperpod-eks":
        plans = [node_role(spec, place)]
        if spec.controller and spec.access.node_role is None:
            about = f"Slurm's controller of {spec.name}"
            plans.append(_ec2_role(spec, place, CONTROLLER, about, controller_statements(spec, place)))
        if any(map(spec.is_login, spec.groups)) and spec.access.node_role is None:
            about = f"Logins of {spec.name}"
            plans.append(_ec2_role(spec, place, LOGIN, about, login_statements(spec, place)))
        if spec.monitor:
            about = f"Prometheus and Grafana of {spec.name}"
            plans.append(_ec2_role(spec, place, MONITOR, about, monitor_statements(spec, place)))
        return tuple(plans)
    pods = {identity.role for identity in pod_identities(spec)}
    plans = [] if spec.eks.existing else [_eks_cluster(spec, place)]
    if CSI_ROLE in pods:
        plans.append(_fsx_csi(spec, place))
    if OPERATOR_ROLE in pods:
        plans.append(_train_operator(spec, place))
    if LOGS_ROLE in pods:
        policy = write_policy(spec, place)
        plans.append(_of_pods(spec, place, LOGS_ROLE, f"Logs of containers of {spec.name}", policy))
    if METRICS_ROLE in pods:
        plans.append(_metrics(spec, place))
    if spec.eks.karpenter:
        plans.append(_karpenter(spec, place))
    named = (replace(plan, existing=getattr(spec.eks, EKS_ROLES[plan.key])) for plan in plans)
    return (node_role(spec, place), *named)


def key_of_existing(plan: RolePlan) -> str:
    """Return the path of the spec's key that names an existing role in place of this one."""
    return f"eks.{EKS_ROLES[plan.key]}" if plan.key in EKS_ROLES else "access.node_role"


def role_path(spec: ClusterSpec) -> str:
    return f"{spec.access.role_path}lustrain/{spec.name}/"


def _role(
    spec: ClusterSpec,
    key: str,
    description: str,
    trusted: Document,
    policy: Document | None = None,
    *,
    managed: tuple[str, ...] = (),
    instance_profile: bool = False,
) -> RolePlan:
    """Return a role with the path and the boundary that all roles of the cluster have."""
    boundary = spec.access.permissions_boundary
    return RolePlan(key, role_path(spec), description, trusted, policy, managed, instance_profile, boundary)


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
    policy = document([allow("Write", WRITE, [group, f"{group}:*"])])
    trusted = trust("vpc-flow-logs", condition=condition)
    return _role(spec, "flow-logs", f"VPC flow logs of {spec.name}", trusted, policy)


def node_role(spec: ClusterSpec, place: Place) -> RolePlan:
    """Return the role of the nodes, whether the stack makes it or uses one that is there."""
    if spec.backend != "ec2":
        return replace(_hyperpod_node(spec, place), existing=spec.access.node_role)
    made = _ec2_role(spec, place, "node", f"Nodes of {spec.name}", node_statements(spec, place))
    return replace(made, existing=spec.access.node_role, existing_profile=spec.access.instance_profile)


def services(plans: Iterable[RolePlan]) -> list[str]:
    """Return the services that take these roles on."""
    return sorted({statement["Principal"]["Service"] for plan in plans for statement in plan.trust["Statement"]})


def _ec2_role(spec: ClusterSpec, place: Place, key: str, description: str, statements: list[Statement]) -> RolePlan:
    """Return the role of an instance of EC2, which Session Manager reaches."""
    managed = (place.managed_policy("AmazonSSMManagedInstanceCore"),)
    policy = document(statements)
    return _role(spec, key, description, trust("ec2"), policy, managed=managed, instance_profile=True)


def _grafana(spec: ClusterSpec, place: Place) -> RolePlan:
    """Trust by account and kind of ARN, since a workspace is not known before it has its role; not tried on AWS."""
    condition = {
        "StringEquals": {"aws:SourceAccount": place.account},
        "StringLike": {"aws:SourceArn": place.arn("grafana", "/workspaces/*")},
    }
    policy = managed_grafana.read_policy(spec, place)
    return _role(
        spec, managed_grafana.ROLE, f"Managed Grafana of {spec.name}", trust("grafana", condition=condition), policy
    )


def _hyperpod_node(spec: ClusterSpec, place: Place) -> RolePlan:
    """Return the role of HyperPod's nodes.

    Its managed policy has logs, metrics, SSM and lifecycle scripts in `sagemaker-…` buckets
    (https://docs.aws.amazon.com/sagemaker/latest/dg/security-iam-awsmanpol-AmazonSageMakerClusterInstanceRolePolicy.html)."""
    return _role(
        spec,
        "node",
        f"HyperPod nodes of {spec.name}",
        trust("sagemaker"),
        document(node_statements(spec, place)),
        managed=(place.managed_policy("AmazonSageMakerClusterInstanceRolePolicy"),),
    )


def _eks_cluster(spec: ClusterSpec, place: Place) -> RolePlan:
    """https://docs.aws.amazon.com/eks/latest/userguide/cluster-iam-role.html"""
    managed = (place.managed_policy("AmazonEKSClusterPolicy"),)
    return _role(spec, CLUSTER_ROLE, f"EKS control plane of {spec.name}", trust("eks"), managed=managed)


def _fsx_csi(spec: ClusterSpec, place: Place) -> RolePlan:
    """Let the driver look only: it mounts the cluster's own file system and makes none."""
    policy = document([allow("FsxLook", ["fsx:DescribeFileSystems"], "*")])
    return _of_pods(spec, place, CSI_ROLE, f"FSx CSI driver of {spec.name}", policy)


def _train_operator(spec: ClusterSpec, place: Place) -> RolePlan:
    """Return what AmazonSageMakerHyperPodTrainingOperatorAccess grants; that policy goes by a tag `SageMaker` of the
    HyperPod cluster, this one by ours
    (https://docs.aws.amazon.com/sagemaker/latest/dg/security-iam-awsmanpol-AmazonSageMakerHyperPodTrainingOperatorAccess.html)."""
    policy = document(
        [allow("NodesLook", ["sagemaker:DescribeClusterNode"], place.arn("sagemaker", "cluster/*"), ours(spec))]
    )
    return _of_pods(spec, place, OPERATOR_ROLE, f"HyperPod training operator of {spec.name}", policy)


def _metrics(spec: ClusterSpec, place: Place) -> RolePlan:
    """Let the collector of AWS's add-on write to the cluster's workspace, and no logs: those are not its job here
    (https://docs.aws.amazon.com/sagemaker/latest/dg/hyperpod-observability-addon-troubleshooting.html)."""
    policy = document([allow("Write", ["aps:RemoteWrite"], place.arn("aps", "workspace/*"), ours(spec))])
    return _of_pods(spec, place, METRICS_ROLE, f"HyperPod's metrics of {spec.name}", policy)


def _of_pods(spec: ClusterSpec, place: Place, key: str, description: str, policy: Document) -> RolePlan:
    """Pods get the role through EKS Pod Identity (https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html)."""
    condition = {
        "StringEquals": {"aws:SourceAccount": place.account},
        "ArnEquals": {"aws:SourceArn": place.arn("eks", f"cluster/{spec.eks_name}")},
    }
    trusted = trust("pods.eks", actions=("sts:AssumeRole", "sts:TagSession"), condition=condition)
    return _role(spec, key, description, trusted, policy)


def _karpenter(spec: ClusterSpec, place: Place) -> RolePlan:
    """HyperPod adds and removes nodes with it, and lets EBS use a customer's key for their volumes. AWS's page allows every
    cluster of the account; the condition on our tag has not been tried on AWS
    (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-autoscaling-iam.html)."""
    through = {"StringEquals": {"kms:ViaService": f"sagemaker.{place.region}.{place.dns_suffix}"}}
    grants: dict[str, dict[str, Any]] = {
        **through,
        "Bool": {"kms:GrantIsForAWSResource": "true"},
        "ForAllValues:StringEquals": {"kms:GrantOperations": list(GRANTED)},
    }
    nodes = ["sagemaker:BatchAddClusterNodes", "sagemaker:BatchDeleteClusterNodes"]
    statements = [
        allow("Nodes", nodes, place.arn("sagemaker", "cluster/*"), ours(spec)),
        allow("VolumeKeyGrant", ["kms:CreateGrant"], place.arn("kms", "key/*"), grants),
        allow("VolumeKeyLook", ["kms:DescribeKey"], place.arn("kms", "key/*"), through),
    ]
    trusted = trust("hyperpod.sagemaker")
    return _role(spec, KARPENTER_ROLE, f"Autoscaling of {spec.name}", trusted, document(statements))
