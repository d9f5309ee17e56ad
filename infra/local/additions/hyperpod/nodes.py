"""The node actions of HyperPod's API, and the node faults and replacements that the event player triggers.

The event player calls `fail_node` (a lost GPU) and `replace_node` (a node that HyperPod replaces).
A replaced node keeps its logical id and gets a new instance id, as HyperPod does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from moto.sagemaker.responses import SageMakerResponse
from moto.utilities.utils import get_partition

from infra.local.additions import lookups
from infra.local.additions.hyperpod import events
from infra.local.additions.hyperpod.clusters import IMAGE_RELEASE, Cluster, Node, get_cluster
from infra.local.additions.serving import LOCK, Call, refuse, serve

LEFT_OUT = (
    "hyperpod nodes: replaced and rebooted at once, without the minutes it takes; never added one by one, no software updates, "
    "no event described alone"
)


def install() -> None:
    serve(
        SageMakerResponse,
        "sagemaker",
        {
            "ListClusterNodes": _list_nodes,
            "DescribeClusterNode": _describe,
            "BatchDeleteClusterNodes": _batch_delete,
            "BatchReplaceClusterNodes": lambda call: _batch(call, _replacement_obstacle, _replace_machine),
            "BatchRebootClusterNodes": lambda call: _batch(call, lambda *_: "", _reboot_machine),
            "ListClusterEvents": _list_events,
        },
    )


def fail_node(account: str, region: str, cluster: str, instance_id: str, fault: str = "NvidiaErrorTerminate") -> str:
    """Report a fault of a node and, with automatic recovery, replace it; return the instance id of the node afterwards."""
    with LOCK:
        hyperpod_cluster, node = _get_node(account, region, cluster, instance_id)
        automatic = hyperpod_cluster.spec.get("NodeRecovery") == "Automatic"
        node.status = "Failure"
        node.message = (
            f"HyperPod Health Monitoring Agent (HMA) has detected fault type {fault} on this node and is unhealthy."
        )
        detail = events.node_health(
            hyperpod_cluster.name,
            hyperpod_cluster.arn,
            node.id,
            healthy=False,
            reason=node.message,
            action="Replace" if automatic else "None",
            advice="Please Replace the Faulty Node.",
        )
        events.publish(account, region, hyperpod_cluster.arn, events.NODE_HEALTH, detail)
        if automatic:
            _replace_machine(hyperpod_cluster, node)
        return node.id


def replace_node(account: str, region: str, cluster: str, instance_id: str) -> str:
    """Replace the machine of a node, with the events of a replacement; return the new instance id."""
    with LOCK:
        hyperpod_cluster, node = _get_node(account, region, cluster, instance_id)
        _replace_machine(hyperpod_cluster, node)
        return node.id


def _get_node(account: str, region: str, cluster: str, instance_id: str) -> tuple[Cluster, Node]:
    hyperpod_cluster = get_cluster(Call(account, region, get_partition(region), {}), cluster)
    node = next(
        (candidate for candidate in hyperpod_cluster.nodes if instance_id in (candidate.id, candidate.logical_id)), None
    )
    if node is None:
        refuse("ValidationException", f"Node {instance_id} does not exist in cluster {hyperpod_cluster.name}.")
    return hyperpod_cluster, node


def _replace_machine(cluster: Cluster, node: Node) -> None:
    previous_id, node.id = node.id, lookups.new_id("i")
    node.status, node.message, node.launched = "Running", "", datetime.now(UTC)
    _record_event(cluster, node.group, previous_id, "Warn", f"Instance {previous_id} is being replaced")
    _record_event(cluster, node.group, node.id, "Info", f"Instance {node.id} has replaced {previous_id} and is Running")
    reason = "The node passed its health checks."
    detail = events.node_health(
        cluster.name, cluster.arn, node.id, healthy=True, reason=reason, action="None", advice="None"
    )
    events.publish(cluster.account, cluster.region, cluster.arn, events.NODE_HEALTH, detail)


def _reboot_machine(cluster: Cluster, node: Node) -> None:
    node.status, node.message = "Running", ""
    _record_event(cluster, node.group, node.id, "Info", f"Instance {node.id} has been rebooted")


def _record_event(cluster: Cluster, group: str, instance_id: str, level: str, description: str) -> None:
    event = events.instance_event(cluster.name, cluster.arn, group, instance_id, level, description)
    cluster.events.append(event)
    events.publish(cluster.account, cluster.region, cluster.arn, events.CLUSTER_EVENT, {"EventDetails": event})


def _summary(node: Node) -> dict[str, Any]:
    return {
        "InstanceGroupName": node.group,
        "InstanceId": node.id,
        "InstanceType": node.instance_type,
        "LaunchTime": node.launched,
        "InstanceStatus": {"Status": node.status, "Message": node.message},
        "PrivateDnsHostname": _host(node),
        "CurrentImageReleaseVersion": IMAGE_RELEASE,
    }


def _address(node: Node) -> str:
    # The id determines the address, so that it stays with the machine; no address of the subnet is used up.
    return f"10.{int(node.id[3:5], 16)}.{int(node.id[5:7], 16)}.{int(node.id[7:9], 16)}"


def _host(node: Node) -> str:
    return f"ip-{_address(node).replace('.', '-')}"


def _list_nodes(call: Call) -> Mapping[str, Any]:
    cluster = get_cluster(call, call.params["ClusterName"])
    summaries = []
    for node in cluster.nodes:
        if call.get("InstanceGroupNameContains", "") in node.group:
            logical = {"NodeLogicalId": node.logical_id} if call.get("IncludeNodeLogicalIds") else {}
            summaries.append(_summary(node) | logical)
    return {"ClusterNodeSummaries": summaries}


def _describe(call: Call) -> Mapping[str, Any]:
    node_id = call.get("NodeId") or call.get("NodeLogicalId", "")
    cluster, node = _get_node(call.account, call.region, call.params["ClusterName"], node_id)
    group = cluster.group(node.group)
    spot = "Spot" in group.get("CapacityRequirements", {})
    network = group.get("OverrideVpcConfig") or cluster.spec.get("VpcConfig") or {"Subnets": []}
    details = _summary(node) | {
        "NodeLogicalId": node.logical_id,
        "PrivatePrimaryIp": _address(node),
        "CapacityType": "Spot" if spot else "OnDemand",
    }
    for subnet in (lookups.find_subnet(call, subnet_id) for subnet_id in network["Subnets"][:1]):
        if subnet is not None:
            placement = {
                "AvailabilityZone": subnet.availability_zone,
                "AvailabilityZoneId": subnet.availability_zone_id,
            }
            details["Placement"] = placement
    for name in ("LifeCycleConfig", "ThreadsPerCore", "InstanceStorageConfigs", "OverrideVpcConfig"):
        if name in group:
            details[name] = group[name]
    return {"NodeDetails": details}


def _batch_delete(call: Call) -> Mapping[str, Any]:
    cluster = get_cluster(call, call.params["ClusterName"])
    deleted: list[Node] = []
    answers: dict[str, list[Any]] = {"Successful": [], "Failed": []}
    for instance_id in call.get("NodeIds", []):
        node = next((candidate for candidate in cluster.nodes if candidate.id == instance_id), None)
        if node is None:
            answers["Failed"].append(_failure("NodeIdNotFound", "No such node.", instance_id, "Code"))
        elif cluster.is_controller(node):
            answers["Failed"].append(
                _failure("InvalidNodeStatus", "Controller nodes cannot be deleted.", instance_id, "Code")
            )
        else:
            deleted.append(node)
            answers["Successful"].append(instance_id)
    for node in deleted:
        cluster.nodes.remove(node)
        cluster.group(node.group)["InstanceCount"] -= 1
        _record_event(cluster, node.group, node.id, "Info", f"Instance {node.id} has been deleted")
    return answers


def _batch(
    call: Call, obstacle: Callable[[Cluster, Node], str], act: Callable[[Cluster, Node], None]
) -> Mapping[str, Any]:
    cluster = get_cluster(call, call.params["ClusterName"])
    answers: dict[str, list[Any]] = {"Successful": [], "Failed": []}
    for instance_id in call.get("NodeIds", []):
        node = next((candidate for candidate in cluster.nodes if candidate.id == instance_id), None)
        problem = obstacle(cluster, node) if node else ""
        if node is None:
            answers["Failed"].append(_failure("InstanceIdNotFound", "No such node.", instance_id, "ErrorCode"))
        elif problem:
            answers["Failed"].append(_failure("InvalidInstanceStatus", problem, instance_id, "ErrorCode"))
        else:
            act(cluster, node)
            answers["Successful"].append(instance_id)
    return answers


def _replacement_obstacle(cluster: Cluster, node: Node) -> str:
    return "Controller nodes cannot be replaced." if cluster.is_controller(node) else ""


def _failure(code: str, message: str, instance_id: str, member: str) -> dict[str, str]:
    return {member: code, "Message": message, "NodeId": instance_id}


def _get_continuous_cluster(call: Call) -> Cluster:
    cluster = get_cluster(call, call.params["ClusterName"])
    if cluster.spec.get("NodeProvisioningMode") != "Continuous":
        refuse("ValidationException", "Cluster events are supported when NodeProvisioningMode is Continuous only.")
    return cluster


def _list_events(call: Call) -> Mapping[str, Any]:
    filters = {"InstanceGroupName": call.get("InstanceGroupName"), "InstanceId": call.get("NodeId")}
    matching = [
        event
        for event in _get_continuous_cluster(call).events
        if all(value in (None, event[name]) for name, value in filters.items())
    ]
    return {"Events": matching if call.get("SortOrder") == "Ascending" else matching[::-1]}
