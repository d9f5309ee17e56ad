"""AWS::SageMaker::Cluster as Cloud Control sees it: CreateCluster's request plus what the service adds.

The members of the resource type and of the API have the same names; the type's read-only ones come from DescribeCluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from moto.core.utils import get_service_model

from infra.local.additions.hyperpod import clusters as hyperpod
from infra.local.additions.serving import Call, refuse, shape_errors

TYPE = "AWS::SageMaker::Cluster"


def create(call: Call, model: Mapping[str, Any]) -> str:
    _check_shape(model)
    return hyperpod.create_cluster(call, model, model.get("Tags") or []).arn


def read(call: Call, identifier: str) -> dict[str, Any] | None:
    """Return the model of the cluster with this ARN, None when it does not exist."""
    cluster = hyperpod.find_cluster(call, identifier)
    if cluster is None:
        return None
    model = deepcopy(cluster.spec)
    for group in model.get("InstanceGroups") or []:
        group["CurrentCount"] = sum(node.group == group["InstanceGroupName"] for node in cluster.nodes)
    created = cluster.created.isoformat()
    return model | {
        "ClusterArn": cluster.arn,
        "ClusterStatus": cluster.status,
        "CreationTime": created,
        "FailureMessage": "",
        **({"Tags": cluster.tags} if cluster.tags else {}),
    }


def update(call: Call, identifier: str, model: Mapping[str, Any]) -> None:
    _check_shape(model)
    cluster = hyperpod.get_cluster(call, identifier)
    hyperpod.change_cluster(call, cluster, {name: value for name, value in model.items() if name != "Tags"})
    cluster.tags = list(model.get("Tags") or [])


def delete(call: Call, identifier: str) -> None:
    hyperpod.delete_cluster(call, identifier)


def is_settled(call: Call, identifier: str) -> bool:
    """Whether the cluster has no transition in progress, or no longer exists; one that is in progress ends with the answer."""
    cluster = hyperpod.find_cluster(call, identifier)
    settled = cluster is None or cluster.status == "InService"
    if cluster is not None:
        hyperpod.finish_transition(cluster)
    return settled


def _check_shape(model: Mapping[str, Any]) -> None:
    errors = list(shape_errors(get_service_model("sagemaker").operation_model("CreateCluster").input_shape, model))
    if errors:
        refuse("ValidationException", "; ".join(errors))
