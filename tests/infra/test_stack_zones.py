"""A group that names another zone than its cluster's: the whole program puts its machines, and nothing else, there."""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pytest

from infra.components.stack import declare
from infra.local.mocks import Recorder
from tests.infra.edits import place, spec_of
from tests.infra.mistakes import SLURM, SPOT
from tests.infra.registered import Registered, run_on

SUBNET = "aws:ec2/subnet:Subnet"


def declared(stack: str, **edits: Any) -> Registered:
    spec, where = spec_of(stack, edits), place(stack)
    service = Recorder(where.region)

    def program() -> dict[str, pulumi.Output[Any]]:
        return {key: pulumi.Output.from_input(value) for key, value in declare(spec, where).items()}

    return run_on(Registered(service), service, program)[0]


@pytest.mark.slow
def test_a_gang_on_ec2_lies_in_the_subnet_of_its_zone_and_is_told_it() -> None:
    reserved = {"mode": "reservation", "create": True}
    edits = {"groups.0.zone_id": "use1-az2", "groups.0.capacity": reserved, "suppress": []}
    made = declared(SPOT, **edits)
    zones = {name: made.properties(name)["availabilityZoneId"] for name in made.named(SUBNET)}
    (there,) = [name for name, zone in zones.items() if zone == "use1-az2"]
    (gang,) = made.named("aws:autoscaling/group:Group")
    assert made.properties(gang)["vpcZoneIdentifiers"] == [f"{there}-id"]
    (lustre,) = made.named("aws:fsx/lustreFileSystem:LustreFileSystem")
    assert f"{there}-id" not in made.properties(lustre)["subnetIds"]


@pytest.mark.slow
def test_a_hyperpod_group_overrides_the_clusters_subnet_and_keeps_its_security_group() -> None:
    made = declared(SLURM, **{"groups.1.zone_id": "usw2-az3"})
    (cluster,) = made.named("aws:cloudcontrol/resource:Resource")
    state = json.loads(made.properties(cluster)["desiredState"])
    overrides = [group.get("OverrideVpcConfig") for group in state["InstanceGroups"]]
    subnet = f"{state['ClusterName']}-compute-usw2-az3-id"
    assert overrides == [None, {**state["VpcConfig"], "Subnets": [subnet]}, None]
