"""AWS::SageMaker::Cluster as Cloud Control sees it: CreateCluster's request plus what the service adds.

The members of the resource type and of the API have the same names; the type's read-only ones come from DescribeCluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from moto.core.utils import get_service_model

from infra.local.additions.hyperpod import clusters as hyperpod
from infra.local.additions.serving import Call, broken, refuse

TYPE = "AWS::SageMaker::Cluster"


def create(call: Call, model: Mapping[str, Any]) -> str:
    _check_shape(model)
    return hyperpod.create(call, model, model.get("Tags") or []).arn


def read(call: Call, identifier: str) -> dict[str, Any] | None:
    """Return the model of one cluster, named by its ARN; None when there is none."""
    found = hyperpod.find(call, identifier)
    if found is None:
        return None
    model = deepcopy(found.spec)
    for group in model.get("InstanceGroups") or []:
        group["CurrentCount"] = sum(node.group == group["InstanceGroupName"] for node in found.nodes)
    created = found.created.isoformat()
    return model | {
        "ClusterArn": found.arn,
        "ClusterStatus": found.status,
        "CreationTime": created,
        "FailureMessage": "",
        **({"Tags": found.tags} if found.tags else {}),
    }


def update(call: Call, identifier: str, model: Mapping[str, Any]) -> None:
    _check_shape(model)
    found = hyperpod.named(call, identifier)
    hyperpod.change(call, found, {name: value for name, value in model.items() if name != "Tags"})
    found.tags = list(model.get("Tags") or [])


def delete(call: Call, identifier: str) -> None:
    hyperpod.delete(call, identifier)


def identifiers(call: Call) -> list[str]:
    return [found.arn for found in hyperpod.clusters(call).values()]


def settled(call: Call, identifier: str) -> bool:
    """Whether nothing is under way any more."""
    found = hyperpod.find(call, identifier)
    return found is None or found.status == "InService"


def _check_shape(model: Mapping[str, Any]) -> None:
    found = list(broken(get_service_model("sagemaker").operation_model("CreateCluster").input_shape, model))
    if found:
        refuse("ValidationException", "; ".join(found))
