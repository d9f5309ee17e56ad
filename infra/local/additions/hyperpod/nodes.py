"""The nodes of a HyperPod cluster: listed, deleted, rebooted, replaced, failed.

`fail_node` and `replace_node` are for whoever plays events (a lost GPU, a node that HyperPod replaces); the rest is the API.
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
from infra.local.additions.hyperpod.clusters import IMAGE_RELEASE, Cluster, Node, named
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
            "ListClusterNodes": _list,
            "DescribeClusterNode": _describe,
            "BatchDeleteClusterNodes": _batch_delete,
            "BatchReplaceClusterNodes": lambda call: _batch(call, _replaceable, _replace),
            "BatchRebootClusterNodes": lambda call: _batch(call, lambda *_: "", _reboot),
            "ListClusterEvents": _list_events,
        },
    )


def fail_node(account: str, region: str, cluster: str, instance_id: str, fault: str = "NvidiaErrorTerminate") -> str:
    """Play a fault of one node: the health event, and with automatic recovery its replacement; the instance id that runs
    then."""
    with LOCK:
        found, node = _of(account, region, cluster, instance_id)
        automatic = found.spec.get("NodeRecovery") == "Automatic"
        node.status = "Failure"
        node.message = (
            f"HyperPod Health Monitoring Agent (HMA) has detected fault type {fault} on this node and is unhealthy."
        )
        detail = events.health(
            found.name,
            found.arn,
            node.id,
            healthy=False,
            reason=node.message,
            action="Replace" if automatic else "None",
            advice="Please Replace the Faulty Node.",
        )
        events.put(account, region, found.arn, events.NODE_HEALTH, detail)
        if automatic:
            _replace(found, node)
        return node.id


def replace_node(account: str, region: str, cluster: str, instance_id: str) -> str:
    """Put a new machine in the place of one; its instance id. The events are those of a replacement."""
    with LOCK:
        found, node = _of(account, region, cluster, instance_id)
        _replace(found, node)
        return node.id


def _of(account: str, region: str, cluster: str, instance_id: str) -> tuple[Cluster, Node]:
    found = named(Call(account, region, get_partition(region), {}), cluster)
    node = next((item for item in found.nodes if instance_id in (item.id, item.logical_id)), None)
    if node is None:
        refuse("ValidationException", f"Node {instance_id} does not exist in cluster {found.name}.")
    return found, node


def _replace(found: Cluster, node: Node) -> None:
    old, node.id = node.id, lookups.new_id("i")
    node.status, node.message, node.launched = "Running", "", datetime.now(UTC)
    _record_event(found, node.group, old, "Warn", f"Instance {old} is being replaced")
    _record_event(found, node.group, node.id, "Info", f"Instance {node.id} has replaced {old} and is Running")
    reason = "The node passed its health checks."
    detail = events.health(found.name, found.arn, node.id, healthy=True, reason=reason, action="None", advice="None")
    events.put(found.account, found.region, found.arn, events.NODE_HEALTH, detail)


def _reboot(found: Cluster, node: Node) -> None:
    node.status, node.message = "Running", ""
    _record_event(found, node.group, node.id, "Info", f"Instance {node.id} has been rebooted")


def _record_event(found: Cluster, group: str, instance_id: str, level: str, description: str) -> None:
    event = events.occurrence(found.name, found.arn, group, instance_id, level, description)
    found.events.append(event)
    events.put(found.account, found.region, found.arn, events.CLUSTER_EVENT, {"EventDetails": event})


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
    # From the id, so that it stays with the machine; the subnet's addresses are not drawn on.
    return f"10.{int(node.id[3:5], 16)}.{int(node.id[5:7], 16)}.{int(node.id[7:9], 16)}"


def _host(node: Node) -> str:
    return f"ip-{_address(node).replace('.', '-')}"


def _list(call: Call) -> Mapping[str, Any]:
    found = named(call, call.params["ClusterName"])
    shown = []
    for node in found.nodes:
        if call.get("InstanceGroupNameContains", "") in node.group:
            logical = {"NodeLogicalId": node.logical_id} if call.get("IncludeNodeLogicalIds") else {}
            shown.append(_summary(node) | logical)
    return {"ClusterNodeSummaries": shown}


def _describe(call: Call) -> Mapping[str, Any]:
    wanted = call.get("NodeId") or call.get("NodeLogicalId", "")
    found, node = _of(call.account, call.region, call.params["ClusterName"], wanted)
    group = found.group(node.group)
    spot = "Spot" in group.get("CapacityRequirements", {})
    network = group.get("OverrideVpcConfig") or found.spec.get("VpcConfig") or {"Subnets": []}
    details = _summary(node) | {
        "NodeLogicalId": node.logical_id,
        "PrivatePrimaryIp": _address(node),
        "CapacityType": "Spot" if spot else "OnDemand",
    }
    for subnet in (lookups.subnet(call, subnet_id) for subnet_id in network["Subnets"][:1]):
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
    found = named(call, call.params["ClusterName"])
    done: list[Node] = []
    answers: dict[str, list[Any]] = {"Successful": [], "Failed": []}
    for instance_id in call.get("NodeIds", []):
        node = next((item for item in found.nodes if item.id == instance_id), None)
        if node is None:
            answers["Failed"].append(_failure("NodeIdNotFound", "No such node.", instance_id, "Code"))
        elif found.controls(node):
            answers["Failed"].append(
                _failure("InvalidNodeStatus", "Controller nodes cannot be deleted.", instance_id, "Code")
            )
        else:
            done.append(node)
            answers["Successful"].append(instance_id)
    for node in done:
        found.nodes.remove(node)
        found.group(node.group)["InstanceCount"] -= 1
        _record_event(found, node.group, node.id, "Info", f"Instance {node.id} has been deleted")
    return answers


def _batch(
    call: Call, obstacle: Callable[[Cluster, Node], str], act: Callable[[Cluster, Node], None]
) -> Mapping[str, Any]:
    found = named(call, call.params["ClusterName"])
    answers: dict[str, list[Any]] = {"Successful": [], "Failed": []}
    for instance_id in call.get("NodeIds", []):
        node = next((item for item in found.nodes if item.id == instance_id), None)
        problem = obstacle(found, node) if node else ""
        if node is None:
            answers["Failed"].append(_failure("InstanceIdNotFound", "No such node.", instance_id, "ErrorCode"))
        elif problem:
            answers["Failed"].append(_failure("InvalidInstanceStatus", problem, instance_id, "ErrorCode"))
        else:
            act(found, node)
            answers["Successful"].append(instance_id)
    return answers


def _replaceable(found: Cluster, node: Node) -> str:
    return "Controller nodes cannot be replaced." if found.controls(node) else ""


def _failure(code: str, message: str, instance_id: str, member: str) -> dict[str, str]:
    return {member: code, "Message": message, "NodeId": instance_id}


def _continuous(call: Call) -> Cluster:
    found = named(call, call.params["ClusterName"])
    if found.spec.get("NodeProvisioningMode") != "Continuous":
        refuse("ValidationException", "Cluster events are supported when NodeProvisioningMode is Continuous only.")
    return found


def _list_events(call: Call) -> Mapping[str, Any]:
    wanted = {"InstanceGroupName": call.get("InstanceGroupName"), "InstanceId": call.get("NodeId")}
    found = [
        event
        for event in _continuous(call).events
        if all(value in (None, event[name]) for name, value in wanted.items())
    ]
    return {"Events": found if call.get("SortOrder") == "Ascending" else found[::-1]}
