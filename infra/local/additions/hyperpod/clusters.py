"""SageMaker HyperPod clusters: every field kept, the service's rules, nodes that come, fail, are replaced and go."""

from __future__ import annotations

import secrets
import threading
import time
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
from infra.local.additions.serving import LOCK, Call, refuse, serve

LEFT_OUT = (
    "hyperpod: nodes are records; every group reaches its target at once, a training plan, an image and an accounting database "
    "are taken at their word, health checks find nothing; no patches, restricted groups, groups of several types, account "
    "roots of EKS access entries, scaling by Karpenter, second image version or pages of long listings"
)
SETTLING_SECONDS = 0.3
IMAGE_RELEASE = "1.0.0"
KEPT = (
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
    """One machine; `logical_id` stays when the machine behind it is replaced."""

    group: str
    instance_type: str
    id: str = field(default_factory=lambda: lookups.new_id("i"))
    logical_id: str = field(default_factory=lambda: f"node-{secrets.token_hex(8)}")
    launched: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: str = "Running"
    message: str = ""


@dataclass
class Cluster:
    """`spec` has the members of CreateCluster's request; moto's tag actions ask for `tags` and `arn`."""

    account: str
    region: str
    arn: str
    spec: dict[str, Any]
    tags: list[dict[str, str]]
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    settling: str = "Creating"
    settled: float = field(default_factory=lambda: time.monotonic() + SETTLING_SECONDS)
    nodes: list[Node] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.spec["ClusterName"])

    @property
    def id(self) -> str:
        return self.arn.rpartition("/")[2]

    @property
    def status(self) -> str:
        return "InService" if time.monotonic() >= self.settled else self.settling

    def settle(self, meanwhile: str) -> None:
        """In `meanwhile` for a moment; a continuous cluster stays in service while its groups scale."""
        if self.spec.get("NodeProvisioningMode") != "Continuous":
            self.settling, self.settled = meanwhile, time.monotonic() + SETTLING_SECONDS

    def groups(self) -> Iterator[dict[str, Any]]:
        yield from self.spec.get("InstanceGroups") or []

    def group(self, name: str) -> dict[str, Any]:
        found = next((group for group in self.groups() if group["InstanceGroupName"] == name), None)
        if found is None:
            refuse("ValidationException", f"Instance group {name} does not exist in cluster {self.name}.")
        return found

    def controls(self, node: Node) -> bool:
        return bool(self.group(node.group).get("SlurmConfig", {}).get("NodeType") == "Controller")


def install() -> None:
    serve(
        SageMakerResponse,
        "sagemaker",
        {
            "CreateCluster": lambda call: {"ClusterArn": create(call, call.params, call.get("Tags", [])).arn},
            "DescribeCluster": lambda call: described(named(call, call.params["ClusterName"])),
            "UpdateCluster": _update,
            "DeleteCluster": lambda call: {"ClusterArn": delete(call, call.params["ClusterName"]).arn},
            "ListClusters": _list,
        },
    )


def clusters(call: Call) -> dict[str, Cluster]:
    """By id, the last part of the ARN: so moto's tag actions find them."""
    backend: Any = sagemaker_backends[call.account][call.region]
    found: dict[str, Cluster] = backend.clusters
    return found


def find(call: Call, name_or_arn: str) -> Cluster | None:
    return next((cluster for cluster in clusters(call).values() if name_or_arn in (cluster.name, cluster.arn)), None)


def named(call: Call, name_or_arn: str) -> Cluster:
    found = find(call, name_or_arn)
    if found is None:
        refuse("ResourceNotFound", f"Cluster with name {name_or_arn} not found.")
    return found


def create(call: Call, request: Mapping[str, Any], tags: list[dict[str, str]]) -> Cluster:
    """Make a cluster of CreateCluster's `request`, which is already known to have its shape."""
    name = request["ClusterName"]
    if find(call, name) is not None:
        message = f"Resource Already Exists: Cluster with name {name} already exists. Choose a different name."
        refuse("ResourceInUse", message)
    hyperpod_rules.check(call, request)
    spec = deepcopy({key: value for key, value in request.items() if key != "Tags"})
    spec.setdefault("NodeRecovery", "Automatic")
    arn = f"arn:{call.partition}:sagemaker:{call.region}:{call.account}:cluster/{secrets.token_hex(6)}"
    made = Cluster(call.account, call.region, arn, spec, list(tags))
    clusters(call)[made.id] = made
    scale(made)
    _announce(made)
    return made


def change(call: Call, found: Cluster, spec: Mapping[str, Any]) -> None:
    """Bring a cluster to `spec`, a whole request: groups that are not in it go."""
    if found.status != "InService":
        refuse("ConflictException", f"Cluster {found.name} is {found.status}; it must be InService.")
    hyperpod_rules.check_change(found.spec, spec)
    hyperpod_rules.check(call, spec)
    found.spec = deepcopy(dict(spec))
    found.settle("Updating")
    scale(found)
    _announce(found)


def delete(call: Call, name_or_arn: str) -> Cluster:
    found = named(call, name_or_arn)
    del clusters(call)[found.id]
    found.settling, found.settled = "Deleting", float("inf")
    _announce(found)
    return found


def scale(found: Cluster) -> None:
    """Nodes for what the groups ask; the youngest go first."""
    wanted = {group["InstanceGroupName"]: group for group in found.groups()}
    found.nodes = [node for node in found.nodes if node.group in wanted]
    for name, group in wanted.items():
        mine = [node for node in found.nodes if node.group == name]
        surplus = {node.id for node in mine[group["InstanceCount"] :]}
        found.nodes = [node for node in found.nodes if node.id not in surplus]
        found.nodes += [Node(name, group["InstanceType"]) for _ in range(group["InstanceCount"] - len(mine))]


def described(found: Cluster) -> dict[str, Any]:
    """Return the answer of DescribeCluster."""
    shown: dict[str, Any] = {
        "ClusterArn": found.arn,
        "ClusterName": found.name,
        "ClusterStatus": found.status,
        "CreationTime": found.created,
        "FailureMessage": "",
        **{name: found.spec[name] for name in KEPT if name in found.spec},
    }
    shown["InstanceGroups"] = [_described_group(found, group) for group in found.spec.get("InstanceGroups") or []]
    if "AutoScaling" in shown:
        shown["AutoScaling"] = {**shown["AutoScaling"], "Status": "InService"}
    return shown


def _described_group(found: Cluster, group: Mapping[str, Any]) -> dict[str, Any]:
    shown = {
        name: value for name, value in group.items() if name not in ("InstanceCount", "MinInstanceCount", "ImageId")
    }
    shown["CurrentCount"] = sum(node.group == group["InstanceGroupName"] for node in found.nodes)
    shown["TargetCount"] = group["InstanceCount"]
    shown["Status"] = found.status if found.status in ("Creating", "Updating") else "InService"
    if "MinInstanceCount" in group:
        shown["MinCount"] = group["MinInstanceCount"]
    if "KubernetesConfig" in group:
        asked = group["KubernetesConfig"]
        shown["KubernetesConfig"] = {f"{when}{part}": asked[part] for part in asked for when in ("Current", "Desired")}
    if "ImageId" in group:
        shown |= dict.fromkeys(("CurrentImageId", "DesiredImageId"), group["ImageId"])
    if "AutoPatchConfig" in group:
        shown["AutoPatchConfig"] = {key: one for key, one in group["AutoPatchConfig"].items() if key != "PatchSchedule"}
    shown["CurrentImageReleaseVersion"] = shown.pop("ImageReleaseVersion", IMAGE_RELEASE)
    return shown


def _update(call: Call) -> Mapping[str, Any]:
    found = named(call, call.params["ClusterName"])
    gone = call.get("InstanceGroupsToDelete", [])
    for name in gone:
        found.group(name)
    spec = {**found.spec, **{name: call.params[name] for name in KEPT if name in call.params}}
    groups = {group["InstanceGroupName"]: group for group in (*found.groups(), *call.get("InstanceGroups", []))}
    spec["InstanceGroups"] = [group for name, group in groups.items() if name not in gone]
    change(call, found, spec)
    return {"ClusterArn": found.arn}


def _announce(found: Cluster) -> None:
    """Tell EventBridge the state now and, when the cluster is on its way, once more on arrival."""
    _put_state_event(found)
    if found.status != "InService" and found.settled != float("inf"):
        timer = threading.Timer(SETTLING_SECONDS, _put_state_event, (found,))
        timer.daemon = True
        timer.start()


def _put_state_event(found: Cluster) -> None:
    with LOCK:
        hyperpod_events.put(found.account, found.region, found.arn, hyperpod_events.STATE_CHANGE, described(found))


def _list(call: Call) -> Mapping[str, Any]:
    found = sorted(clusters(call).values(), key=lambda one: one.created, reverse=call.get("SortOrder") == "Descending")
    if call.get("SortBy") == "NAME":
        found.sort(key=lambda one: one.name, reverse=call.get("SortOrder") == "Descending")
    summaries = [
        {
            "ClusterArn": item.arn,
            "ClusterName": item.name,
            "CreationTime": item.created,
            "ClusterStatus": item.status,
        }
        for item in found
        if call.get("NameContains", "") in item.name
    ]
    return {"ClusterSummaries": summaries}
