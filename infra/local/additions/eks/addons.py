"""EKS add-ons: made, shown, updated and deleted; those whose pods need a node stay DEGRADED until the cluster has one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from moto.eks.responses import EKSResponse

from infra.local.additions.eks.access import add_identity
from infra.local.additions.eks.clusters import INVALID, ControlPlane, active, arn, control_plane, invalid, note_update
from infra.local.additions.hyperpod import clusters as hyperpod
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "eks add-ons: nothing is installed; two made-up versions each, the second for every Kubernetes version; configuration "
    "values are held against no schema and conflict with nothing"
)
CREATING_SECONDS = 0.2
VERSIONS = ("v1.0.0-eksbuild.1", "v1.1.0-eksbuild.1")
ON_EVERY_NODE = ("vpc-cni", "kube-proxy", "eks-pod-identity-agent", "eks-node-monitoring-agent")
"""DaemonSets: healthy without a node."""
ON_SOME_NODE = (
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


NEEDS = {"amazon-sagemaker-hyperpod-training-operator": "cert-manager"}
"""Without it the pods do not start (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator-install.html)."""


def install() -> None:
    serve(
        EKSResponse,
        "eks",
        {
            "CreateAddon": _create,
            "DescribeAddon": lambda call: {"addon": _shown(call, _addon(call))},
            "UpdateAddon": _update,
            "DeleteAddon": _delete,
            "ListAddons": lambda call: {"addons": list(_plane(call).parts["addons"])},
            "DescribeAddonVersions": _versions,
        },
        invalid=INVALID,
    )


def _plane(call: Call) -> ControlPlane:
    return control_plane(call, call.params["clusterName"])


def _addon(call: Call) -> dict[str, Any]:
    name = call.params["addonName"]
    found: dict[str, Any] | None = _plane(call).parts["addons"].get(name)
    if found is None:
        refuse("ResourceNotFoundException", f"No addon: {name} found in cluster: {call.params['clusterName']}")
    return found


def _create(call: Call) -> Mapping[str, Any]:
    found, name = active(call), call.params["addonName"]
    if name not in (*ON_EVERY_NODE, *ON_SOME_NODE):
        invalid(f"Addon {name} specified is not supported in {found.version} kubernetes version")
    if name in found.parts["addons"]:
        refuse("ResourceInUseException", "Addon already exists.", clusterName=found.name, addonName=name)
    _check_values(call)
    now = datetime.now(UTC)
    record = {
        "addonName": name,
        "clusterName": found.name,
        "addonVersion": _version(call.get("addonVersion", VERSIONS[-1])),
        "addonArn": arn(call, "addon", f"{found.name}/{name}/{uuid4()}"),
        "createdAt": now,
        "modifiedAt": now,
        "tags": dict(call.get("tags", {})),
        "podIdentityAssociations": _identities(call, found),
        "ready": time.monotonic() + CREATING_SECONDS,
    }
    for member in ("serviceAccountRoleArn", "configurationValues"):
        if call.get(member) is not None:
            record[member] = call.params[member]
    found.parts["addons"][name] = record
    return {"addon": _shown(call, record)}


def _version(asked: str) -> str:
    if asked not in VERSIONS:
        invalid("Addon version specified is not supported")
    return asked


def _check_values(call: Call) -> None:
    try:
        json.loads(call.get("configurationValues", "{}"))
    except ValueError:
        invalid("ConfigurationValue is not in valid JSON/YAML format")


def _identities(call: Call, found: ControlPlane) -> list[str]:
    asked = call.get("podIdentityAssociations", [])
    return [
        str(add_identity(call, found, "kube-system", item["serviceAccount"], item["roleArn"])["associationArn"])
        for item in asked
    ]


def _shown(call: Call, record: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in record.items() if name != "ready"}
    plane, name = _plane(call), record["addonName"]
    alone = name in NEEDS and NEEDS[name] not in plane.parts["addons"]
    lonely = alone or (name in ON_SOME_NODE and not _nodes(call, plane))
    issue = {
        "code": "InsufficientNumberOfReplicas",
        "message": "The add-on is unhealthy because it doesn't have the desired number of replicas.",
        "resourceIds": [],
    }
    shown["health"] = {"issues": [issue] if lonely else []}
    settled = "DEGRADED" if lonely else "ACTIVE"
    shown["status"] = settled if time.monotonic() >= record["ready"] else "CREATING"
    return shown


def _nodes(call: Call, found: ControlPlane) -> int:
    pods = [cluster for cluster in hyperpod.clusters(call).values() if _orchestrated_by(cluster, found.arn)]
    return len(found.nodegroups) + len(found.fargate_profiles) + sum(len(pod.nodes) for pod in pods)


def _orchestrated_by(cluster: hyperpod.Cluster, eks_arn: str) -> bool:
    orchestrator = cluster.spec.get("Orchestrator") or {}
    return bool((orchestrator.get("Eks") or {}).get("ClusterArn") == eks_arn)


def _update(call: Call) -> Mapping[str, Any]:
    record = _addon(call)
    _check_values(call)
    if "addonVersion" in call.params:
        _version(call.params["addonVersion"])
    for name in ("addonVersion", "serviceAccountRoleArn", "configurationValues"):
        if call.get(name) is not None:
            record[name] = call.params[name]
    if "podIdentityAssociations" in call.params:
        plane = _plane(call)
        for old in record["podIdentityAssociations"]:
            plane.parts["identities"].pop(old.rpartition("/")[2], None)
        record["podIdentityAssociations"] = _identities(call, plane)
    record["modifiedAt"] = datetime.now(UTC)
    return {"update": note_update(_plane(call), "AddonUpdate", {"AddonVersion": record["addonVersion"]})}


def _delete(call: Call) -> Mapping[str, Any]:
    record, plane = _addon(call), _plane(call)
    shown = _shown(call, record) | {"status": "DELETING"}
    for association in record["podIdentityAssociations"]:
        plane.parts["identities"].pop(association.rpartition("/")[2], None)
    del plane.parts["addons"][record["addonName"]]
    return {"addon": shown}


def _versions(call: Call) -> Mapping[str, Any]:
    wanted = call.get("addonName")
    kubernetes = call.get("kubernetesVersion", "1.33")

    def info(version: str) -> dict[str, Any]:
        fits = {"clusterVersion": kubernetes, "platformVersions": ["*"], "defaultVersion": version == VERSIONS[-1]}
        return {"addonVersion": version, "architecture": ["amd64", "arm64"], "compatibilities": [fits]}

    names = [name for name in (*ON_EVERY_NODE, *ON_SOME_NODE) if wanted in (None, name)]
    found = [
        {
            "addonName": name,
            "type": "networking",
            "addonVersions": [info(version) for version in reversed(VERSIONS)],
            "publisher": "eks",
            "owner": "aws",
        }
        for name in names
    ]
    return {"addons": found}
