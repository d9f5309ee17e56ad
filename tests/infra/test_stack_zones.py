"""A group that names another zone than its cluster's: the whole program puts its machines, and nothing else, there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.infra.mistakes import EXISTING, SLURM, SPOT
from tests.infra.registered import Registered, built

ZONE = {"groups.0.zone_id": "use1-az2", "groups.0.capacity": {"mode": "reservation", "create": True}, "suppress": []}


def declared(stack: str, **edits: Any) -> Registered:
    return built(stack, edits)[0]


@pytest.mark.slow
def test_group_on_ec2_lies_in_subnet_of_its_zone_and_knows_it() -> None:
    made = declared(SPOT, **ZONE)
    zones = {name: one["availabilityZoneId"] for name, one in made.of("aws:ec2/subnet:Subnet").items()}
    (there,) = [name for name, zone in zones.items() if zone == "use1-az2"]
    (node_group,) = made.of("aws:autoscaling/group:Group").values()
    assert node_group["vpcZoneIdentifiers"] == [f"{there}-id"]
    (lustre,) = made.of("aws:fsx/lustreFileSystem:LustreFileSystem").values()
    assert f"{there}-id" not in lustre["subnetIds"]


@pytest.mark.slow
def test_zone_group_in_an_existing_network_lies_in_named_subnet() -> None:
    there = {**EXISTING, "zone_subnet_ids": {"use1-az2": "subnet-0fedcba9876543210"}}
    (node_group,) = declared(SPOT, **ZONE, **{"network.existing": there}).of("aws:autoscaling/group:Group").values()
    assert node_group["vpcZoneIdentifiers"] == ["subnet-0fedcba9876543210"]


@pytest.mark.slow
def test_hyperpod_group_overrides_subnet_not_the_security_group() -> None:
    made = declared(SLURM, **{"groups.1.zone_id": "usw2-az3"})
    (cluster,) = made.of("aws:cloudcontrol/resource:Resource").values()
    state = json.loads(cluster["desiredState"])
    overrides = [group.get("OverrideVpcConfig") for group in state["InstanceGroups"]]
    subnet = f"{state['ClusterName']}-compute-usw2-az3-id"
    assert overrides == [None, {**state["VpcConfig"], "Subnets": [subnet]}, None]
