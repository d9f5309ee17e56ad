"""EKS add-ons and their actions; add-ons whose pods need a node stay DEGRADED until the cluster has a node."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from moto.eks.responses import EKSResponse

from infra.local.additions.eks.clusters import (
    DEFAULT_VERSION,
    INVALID,
    ControlPlane,
    arn,
    get_active_cluster,
    get_control_plane,
    record_update,
    refuse_members,
    reject,
)
from infra.local.additions.hyperpod import clusters as hyperpod
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "eks add-ons: nothing is installed; one made-up version each, for every Kubernetes version; configuration values are held "
    "against no schema and conflict with nothing; no pod identities of an add-on's own"
)
VERSION = "v1.1.0-eksbuild.1"
_NOT_KEPT = ("serviceAccountRoleArn", "podIdentityAssociations")
DAEMON_ADDONS = ("vpc-cni", "kube-proxy", "eks-pod-identity-agent", "eks-node-monitoring-agent")
"""DaemonSets, which are healthy without a node."""
POD_ADDONS = (
    "coredns",
    "aws-fsx-csi-driver",
    "aws-ebs-csi-driver",
    "aws-efs-csi-driver",
    "aws-mountpoint-s3-csi-driver",
    "amazon-cloudwatch-observability",
    "amazon-sagemaker-hyperpod-taskgovernance",
    "amazon-sagemaker-hyperpod-training-operator",
    "amazon-sagemaker-hyperpod-observability",
    "metrics-server",
    "cert-manager",
    "snapshot-controller",
)


REQUIRED_ADDONS = {"amazon-sagemaker-hyperpod-training-operator": "cert-manager"}
"""Without the required add-on the pods do not start (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator-install.html)."""


def install() -> None:
    serve(
        EKSResponse,
        "eks",
        {
            "CreateAddon": _create,
            "DescribeAddon": _describe,
            "UpdateAddon": _update,
            "DeleteAddon": _delete,
            "ListAddons": lambda call: {"addons": list(_get_plane(call).parts["addons"])},
            "DescribeAddonVersions": _describe_versions,
        },
        invalid=INVALID,
    )


def _get_plane(call: Call) -> ControlPlane:
    return get_control_plane(call, call.params["clusterName"])


def _get_addon(call: Call) -> dict[str, Any]:
    name = call.params["addonName"]
    addon: dict[str, Any] | None = _get_plane(call).parts["addons"].get(name)
    if addon is None:
        refuse("ResourceNotFoundException", f"No addon: {name} found in cluster: {call.params['clusterName']}")
    return addon


def _create(call: Call) -> Mapping[str, Any]:
    plane, name = get_active_cluster(call), call.params["addonName"]
    refuse_members(call, *_NOT_KEPT)
    if call.get("addonVersion", VERSION) != VERSION:
        reject("Addon version specified is not supported")
    if name not in (*DAEMON_ADDONS, *POD_ADDONS):
        reject(f"Addon {name} specified is not supported in {plane.version} kubernetes version")
    if name in plane.parts["addons"]:
        refuse("ResourceInUseException", "Addon already exists.", clusterName=plane.name, addonName=name)
    now = datetime.now(UTC)
    record = {
        "addonName": name,
        "clusterName": plane.name,
        "addonVersion": VERSION,
        "addonArn": arn(call, "addon", f"{plane.name}/{name}/{uuid4()}"),
        "createdAt": now,
        "modifiedAt": now,
        "tags": dict(call.get("tags", {})),
        "status": "CREATING",
    }
    if call.get("configurationValues") is not None:
        record["configurationValues"] = call.params["configurationValues"]
    plane.parts["addons"][name] = record
    return {"addon": _describe_addon(call, record)}


def _describe(call: Call) -> Mapping[str, Any]:
    record = _get_addon(call)
    description = _describe_addon(call, record)
    record["status"] = "ACTIVE"
    return {"addon": description}


def _describe_addon(call: Call, record: Mapping[str, Any]) -> dict[str, Any]:
    description = dict(record)
    plane, name = _get_plane(call), record["addonName"]
    lacks_required = name in REQUIRED_ADDONS and REQUIRED_ADDONS[name] not in plane.parts["addons"]
    degraded = lacks_required or (name in POD_ADDONS and not _count_nodes(call, plane))
    issue = {
        "code": "InsufficientNumberOfReplicas",
        "message": "The add-on is unhealthy because it doesn't have the desired number of replicas.",
        "resourceIds": [],
    }
    description["health"] = {"issues": [issue] if degraded else []}
    if degraded and record["status"] == "ACTIVE":
        description["status"] = "DEGRADED"
    return description


def _count_nodes(call: Call, plane: ControlPlane) -> int:
    return sum(
        len(cluster.nodes) for cluster in hyperpod.clusters(call).values() if _orchestrated_by(cluster, plane.arn)
    )


def _orchestrated_by(cluster: hyperpod.Cluster, eks_arn: str) -> bool:
    orchestrator = cluster.spec.get("Orchestrator") or {}
    return bool((orchestrator.get("Eks") or {}).get("ClusterArn") == eks_arn)


def _update(call: Call) -> Mapping[str, Any]:
    record = _get_addon(call)
    refuse_members(call, *_NOT_KEPT)
    if call.get("configurationValues") is not None:
        record["configurationValues"] = call.params["configurationValues"]
    record["modifiedAt"] = datetime.now(UTC)
    return {"update": record_update(_get_plane(call), "AddonUpdate")}


def _delete(call: Call) -> Mapping[str, Any]:
    record, plane = _get_addon(call), _get_plane(call)
    description = _describe_addon(call, record) | {"status": "DELETING"}
    del plane.parts["addons"][record["addonName"]]
    return {"addon": description}


def _describe_versions(call: Call) -> Mapping[str, Any]:
    compatibility = {"clusterVersion": call.get("kubernetesVersion", DEFAULT_VERSION), "platformVersions": ["*"]}
    version = {
        "addonVersion": VERSION,
        "architecture": ["amd64", "arm64"],
        "compatibilities": [{**compatibility, "defaultVersion": True}],
    }
    names = [name for name in (*DAEMON_ADDONS, *POD_ADDONS) if call.get("addonName") in (None, name)]
    return {"addons": [{"addonName": name, "addonVersions": [version]} for name in names]}
