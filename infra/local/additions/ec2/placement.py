"""EC2 placement groups, which moto lacks; rules and codes follow the API reference of CreatePlacementGroup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.responses import EC2Response
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, EC2_RESOURCE_TO_PREFIX, convert_tag_spec

from infra.local.additions.lookups import new_id
from infra.local.additions.serving import Call, refuse, serve
from infra.local.patches.wrapping import get_or_create

LEFT_OUT = "placement groups are names, of strategy cluster only: nothing is placed or refused for lack of room"


@dataclass
class PlacementGroup:
    id: str
    name: str
    arn: str
    strategy: str = "cluster"


@cache
def install() -> None:
    """Add the actions to EC2 and register the id prefix, so that groups take tags."""
    register_id_prefix("placement-group", "pg")
    actions = {"CreatePlacementGroup": _create, "DescribePlacementGroups": _describe, "DeletePlacementGroup": _delete}
    serve(EC2Response, "ec2", actions, "InvalidParameterValue")


def placement_groups(backend: Any) -> dict[str, PlacementGroup]:
    """Return the placement groups of this EC2 backend by name."""
    groups: dict[str, PlacementGroup] = get_or_create(backend, "lustrain_placement_groups", dict)
    return groups


def register_id_prefix(resource: str, prefix: str) -> None:
    """Register a prefix of ids with moto, which refuses tags on ids with other prefixes."""
    EC2_RESOURCE_TO_PREFIX[resource] = prefix
    EC2_PREFIX_TO_RESOURCE[prefix] = resource


def put_tags(call: Call, resource: str, resource_id: str) -> None:
    backend = ec2_backends[call.account][call.region]
    backend.create_tags([resource_id], convert_tag_spec(call.get("TagSpecifications", [])).get(resource, {}))


def tag_list(backend: Any, resource_id: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in backend.tags.get(resource_id, {}).items()]


def _create(call: Call) -> Mapping[str, Any]:
    groups = placement_groups(ec2_backends[call.account][call.region])
    name, strategy = call.get("GroupName"), call.get("Strategy", "cluster")
    if strategy != "cluster":
        refuse("InvalidParameterValue", f"The embedded AWS makes cluster placement groups only, not {strategy}.")
    if name in groups:
        refuse("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    group = groups[name] = PlacementGroup(
        id=new_id("pg"),
        name=name,
        arn=f"arn:{call.partition}:ec2:{call.region}:{call.account}:placement-group/{name}",
    )
    put_tags(call, "placement-group", group.id)
    return {"PlacementGroup": _describe_group(ec2_backends[call.account][call.region], group)}


def _describe(call: Call) -> Mapping[str, Any]:
    backend = ec2_backends[call.account][call.region]
    groups = placement_groups(backend)
    names = call.get("GroupNames", [])
    for name in names:
        if name not in groups:
            refuse("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    return {"PlacementGroups": [_describe_group(backend, groups[name]) for name in names or groups]}


def _delete(call: Call) -> Mapping[str, Any]:
    backend, name = ec2_backends[call.account][call.region], call.get("GroupName")
    if name not in placement_groups(backend):
        refuse("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    running = (
        candidate for candidate in backend.all_instances() if candidate.state not in ("terminated", "shutting-down")
    )
    if any(instance.placement.group_name == name for instance in running):
        refuse("InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted.")
    del placement_groups(backend)[name]
    return {}


def _describe_group(backend: Any, group: PlacementGroup) -> dict[str, Any]:
    return {
        "GroupName": group.name,
        "State": "available",
        "Strategy": group.strategy,
        "GroupId": group.id,
        "GroupArn": group.arn,
        "Tags": tag_list(backend, group.id),
    }
