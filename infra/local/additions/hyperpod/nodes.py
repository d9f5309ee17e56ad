"""The list of HyperPod's nodes, and the fault of a node that the event player triggers.

A replaced node keeps its logical id and gets a new instance id, as HyperPod does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from moto.sagemaker.responses import SageMakerResponse
from moto.utilities.utils import get_partition

from infra.local.additions import lookups
from infra.local.additions.hyperpod import events
from infra.local.additions.hyperpod.clusters import IMAGE_RELEASE, Cluster, Node, get_cluster
from infra.local.additions.serving import LOCK, Call, refuse, serve

LEFT_OUT = (
    "hyperpod nodes: listed, and replaced at once after a played fault; not described, replaced, rebooted, added or deleted "
    "one by one, no software updates, no list of events"
)


def install() -> None:
    serve(SageMakerResponse, "sagemaker", {"ListClusterNodes": _list_nodes})


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


def _get_node(account: str, region: str, cluster: str, instance_id: str) -> tuple[Cluster, Node]:
    hyperpod_cluster = get_cluster(Call(account, region, get_partition(region), {}), cluster)
    node = next((candidate for candidate in hyperpod_cluster.nodes if candidate.id == instance_id), None)
    if node is None:
        refuse("ValidationException", f"Node {instance_id} does not exist in cluster {hyperpod_cluster.name}.")
    return hyperpod_cluster, node


def _replace_machine(cluster: Cluster, node: Node) -> None:
    node.id, node.launched = lookups.new_id("i"), datetime.now(UTC)
    node.status, node.message = "Running", ""
    reason = "The node passed its health checks."
    detail = events.node_health(
        cluster.name, cluster.arn, node.id, healthy=True, reason=reason, action="None", advice="None"
    )
    events.publish(cluster.account, cluster.region, cluster.arn, events.NODE_HEALTH, detail)


def _list_nodes(call: Call) -> Mapping[str, Any]:
    cluster = get_cluster(call, call.params["ClusterName"])
    summaries = [
        {
            "InstanceGroupName": node.group,
            "InstanceId": node.id,
            "NodeLogicalId": node.logical_id,
            "InstanceType": node.instance_type,
            "LaunchTime": node.launched,
            "InstanceStatus": {"Status": node.status, "Message": node.message},
            "CurrentImageReleaseVersion": IMAGE_RELEASE,
        }
        for node in cluster.nodes
        if call.get("InstanceGroupNameContains", "") in node.group
    ]
    return {"ClusterNodeSummaries": summaries}
