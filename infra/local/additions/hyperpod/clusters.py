"""SageMaker HyperPod clusters with all fields, and nodes that are records; moto keeps a part of a cluster's members."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from moto.sagemaker.models import sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse

from infra.local.additions import lookups
from infra.local.additions.hyperpod import events as hyperpod_events
from infra.local.additions.hyperpod import rules as hyperpod_rules
from infra.local.additions.serving import Call, refuse, serve

LEFT_OUT = (
    "hyperpod: nodes are records; changes are over after one description; training plans, images and accounting databases "
    "are taken at their word, health checks find nothing; no patches, restricted groups, groups of several types, account "
    "roots of EKS access entries, scaling by Karpenter, second image version or pages of long listings"
)
IMAGE_RELEASE = "1.0.0"
STORED_MEMBERS = (
    "VpcConfig",
    "Orchestrator",
    "NodeRecovery",
    "TieredStorageConfig",
    "NodeProvisioningMode",
    "ClusterRole",
    "AutoScaling",
)


@dataclass
class Node:
    """A node; `logical_id` stays the same when its machine is replaced."""

    group: str
    instance_type: str
    id: str = field(default_factory=lambda: lookups.new_id("i"))
    logical_id: str = field(default_factory=lambda: f"node-{secrets.token_hex(8)}")
    launched: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: str = "Running"
    message: str = ""


@dataclass
class Cluster:
    """A cluster; `spec` has the members of CreateCluster's request, and moto's tag actions read `tags` and `arn`."""

    account: str
    region: str
    arn: str
    spec: dict[str, Any]
    tags: list[dict[str, str]]
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: str = "Creating"
    """The first description after a change still shows the change, so that clients have to wait; there is no clock in it."""
    nodes: list[Node] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.spec["ClusterName"])

    @property
    def id(self) -> str:
        return self.arn.rpartition("/")[2]

    def start_transition(self, status: str) -> None:
        """Show `status` once; a continuous cluster stays in service while its groups scale."""
        if self.spec.get("NodeProvisioningMode") != "Continuous":
            self.status = status

    def groups(self) -> Iterator[dict[str, Any]]:
        yield from self.spec.get("InstanceGroups") or []

    def group(self, name: str) -> dict[str, Any]:
        matching = next((group for group in self.groups() if group["InstanceGroupName"] == name), None)
        if matching is None:
            refuse("ValidationException", f"Instance group {name} does not exist in cluster {self.name}.")
        return matching


def install() -> None:
    serve(
        SageMakerResponse,
        "sagemaker",
        {
            "CreateCluster": lambda call: {"ClusterArn": create_cluster(call, call.params, call.get("Tags", [])).arn},
            "DescribeCluster": _describe,
            "DeleteCluster": lambda call: {"ClusterArn": delete_cluster(call, call.params["ClusterName"]).arn},
            "ListClusters": _list,
        },
    )


def clusters(call: Call) -> dict[str, Cluster]:
    """Return the clusters by id, the last part of the ARN, which moto's tag actions look up."""
    backend: Any = sagemaker_backends[call.account][call.region]
    by_id: dict[str, Cluster] = backend.clusters
    return by_id


def find_cluster(call: Call, name_or_arn: str) -> Cluster | None:
    return next((cluster for cluster in clusters(call).values() if name_or_arn in (cluster.name, cluster.arn)), None)


def get_cluster(call: Call, name_or_arn: str) -> Cluster:
    cluster = find_cluster(call, name_or_arn)
    if cluster is None:
        refuse("ResourceNotFound", f"Cluster with name {name_or_arn} not found.")
    return cluster


def create_cluster(call: Call, request: Mapping[str, Any], tags: list[dict[str, str]]) -> Cluster:
    """Create a cluster from CreateCluster's `request`, whose shape has been checked."""
    name = request["ClusterName"]
    if find_cluster(call, name) is not None:
        message = f"Resource Already Exists: Cluster with name {name} already exists. Choose a different name."
        refuse("ResourceInUse", message)
    hyperpod_rules.check(call, request)
    spec = deepcopy({key: value for key, value in request.items() if key != "Tags"})
    spec.setdefault("NodeRecovery", "Automatic")
    arn = f"arn:{call.partition}:sagemaker:{call.region}:{call.account}:cluster/{secrets.token_hex(6)}"
    cluster = Cluster(call.account, call.region, arn, spec, list(tags))
    clusters(call)[cluster.id] = cluster
    scale_groups(cluster)
    _publish_state(cluster)
    return cluster


def change_cluster(call: Call, cluster: Cluster, spec: Mapping[str, Any]) -> None:
    """Change a cluster to `spec`, a complete request; groups that it does not list are deleted."""
    if cluster.status != "InService":
        refuse("ConflictException", f"Cluster {cluster.name} is {cluster.status}; it must be InService.")
    hyperpod_rules.check_change(cluster.spec, spec)
    hyperpod_rules.check(call, spec)
    cluster.spec = deepcopy(dict(spec))
    cluster.start_transition("Updating")
    scale_groups(cluster)
    _publish_state(cluster)


def delete_cluster(call: Call, name_or_arn: str) -> Cluster:
    cluster = get_cluster(call, name_or_arn)
    del clusters(call)[cluster.id]
    cluster.status = "Deleting"
    _publish_state(cluster)
    return cluster


def finish_transition(cluster: Cluster) -> None:
    """End the transition in progress, if there is one: a client has seen it."""
    if cluster.status != "InService":
        cluster.status = "InService"
        _publish_state(cluster)


def _describe(call: Call) -> Mapping[str, Any]:
    cluster = get_cluster(call, call.params["ClusterName"])
    description = describe_cluster(cluster)
    finish_transition(cluster)
    return description


def scale_groups(cluster: Cluster) -> None:
    """Add and remove nodes to match the instance counts; the youngest nodes are removed first."""
    groups = {group["InstanceGroupName"]: group for group in cluster.groups()}
    cluster.nodes = [node for node in cluster.nodes if node.group in groups]
    for name, group in groups.items():
        group_nodes = [node for node in cluster.nodes if node.group == name]
        surplus = {node.id for node in group_nodes[group["InstanceCount"] :]}
        cluster.nodes = [node for node in cluster.nodes if node.id not in surplus]
        cluster.nodes += [Node(name, group["InstanceType"]) for _ in range(group["InstanceCount"] - len(group_nodes))]


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the answer of DescribeCluster."""
    description: dict[str, Any] = {
        "ClusterArn": cluster.arn,
        "ClusterName": cluster.name,
        "ClusterStatus": cluster.status,
        "CreationTime": cluster.created,
        "FailureMessage": "",
        **{name: cluster.spec[name] for name in STORED_MEMBERS if name in cluster.spec},
    }
    description["InstanceGroups"] = [
        _describe_group(cluster, group) for group in cluster.spec.get("InstanceGroups") or []
    ]
    if "AutoScaling" in description:
        description["AutoScaling"] = {**description["AutoScaling"], "Status": "InService"}
    return description


def _describe_group(cluster: Cluster, group: Mapping[str, Any]) -> dict[str, Any]:
    description = {
        name: value for name, value in group.items() if name not in ("InstanceCount", "MinInstanceCount", "ImageId")
    }
    description["CurrentCount"] = sum(node.group == group["InstanceGroupName"] for node in cluster.nodes)
    description["TargetCount"] = group["InstanceCount"]
    description["Status"] = cluster.status if cluster.status in ("Creating", "Updating") else "InService"
    if "MinInstanceCount" in group:
        description["MinCount"] = group["MinInstanceCount"]
    if "KubernetesConfig" in group:
        kubernetes = group["KubernetesConfig"]
        description["KubernetesConfig"] = {
            f"{prefix}{member}": kubernetes[member] for member in kubernetes for prefix in ("Current", "Desired")
        }
    if "ImageId" in group:
        description |= dict.fromkeys(("CurrentImageId", "DesiredImageId"), group["ImageId"])
    if "AutoPatchConfig" in group:
        description["AutoPatchConfig"] = {
            key: value for key, value in group["AutoPatchConfig"].items() if key != "PatchSchedule"
        }
    description["CurrentImageReleaseVersion"] = description.pop("ImageReleaseVersion", IMAGE_RELEASE)
    return description


def _publish_state(cluster: Cluster) -> None:
    """Publish the state to EventBridge."""
    detail = describe_cluster(cluster)
    hyperpod_events.publish(cluster.account, cluster.region, cluster.arn, hyperpod_events.STATE_CHANGE, detail)


def _list(call: Call) -> Mapping[str, Any]:
    return {
        "ClusterSummaries": [
            {
                "ClusterArn": cluster.arn,
                "ClusterName": cluster.name,
                "CreationTime": cluster.created,
                "ClusterStatus": cluster.status,
            }
            for cluster in clusters(call).values()
            if call.get("NameContains", "") in cluster.name
        ]
    }
