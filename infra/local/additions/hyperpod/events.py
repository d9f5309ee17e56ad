"""Events that HyperPod publishes to EventBridge; rules of the embedded AWS deliver them to their targets.

Forms: https://docs.aws.amazon.com/sagemaker/latest/dg/automating-sagemaker-with-eventbridge.html and
sagemaker-hyperpod-cluster-events-reference.html beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from moto.events.models import events_backends

LEFT_OUT = "hyperpod events: changes of a cluster's state and of its nodes' health, none of provisioning and patching"
STATE_CHANGE = "SageMaker HyperPod Cluster State Change"
NODE_HEALTH = "SageMaker HyperPod Cluster Node Health Event"


def publish(account: str, region: str, resource: str, kind: str, detail: Mapping[str, Any]) -> None:
    """Put an event of SageMaker on the account's default bus."""
    event = {
        "Source": "aws.sagemaker",
        "DetailType": kind,
        "Detail": json.dumps(detail, default=_milliseconds),
        "Resources": [resource],
    }
    events_backends[account][region].put_events([event])


def node_health(
    name: str, arn: str, instance_id: str, *, healthy: bool, reason: str, action: str, advice: str
) -> dict[str, Any]:
    """Return the detail of a node health event; `action` is what HyperPod will do: Replace, Reboot or None."""
    return {
        "ClusterName": name,
        "ClusterArn": arn,
        "InstanceId": instance_id,
        "Tags": {},
        "HealthSummary": {
            "HealthStatus": "Healthy" if healthy else "Unhealthy",
            "HealthStatusReason": reason,
            "RepairAction": action,
            "Recommendation": advice,
        },
    }


def _milliseconds(value: Any) -> int:
    if not isinstance(value, datetime):
        raise TypeError(f"not JSON: {value!r}")
    return int(value.timestamp() * 1000)
