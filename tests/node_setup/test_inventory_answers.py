"""Who is taken from answers of AWS that its stand-in does not give: groups with sick members, and hundreds of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from invoke.context import MockContext

from lustrain.cluster import Cluster, parse
from lustrain.problem import UserError
from node_setup.fleet.flags import Flags
from node_setup.fleet.hosts import Route
from node_setup.fleet.inventory import Inventory, Source, inventory, nodes_of
from node_setup.fleet.run import prepare
from node_setup.request import Tuning
from tests.node_setup.test_inventory import described

MOST_VALUES = 200
"""Of one filter (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html)."""
Member = tuple[str, str, str]


class Aws:
    """An Auto Scaling group with these members, in pages of 50, and their running instances. It knows nothing else."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.asked: list[int] = []

    def __call__(self, service: str) -> Aws:
        return self

    def get_paginator(self, name: str) -> Any:
        return {"describe_auto_scaling_groups": Groups(self), "describe_instances": Instances(self)}[name]


class Groups:
    def __init__(self, aws: Aws) -> None:
        self.aws = aws

    def paginate(self, AutoScalingGroupNames: Sequence[str]) -> Iterator[dict[str, Any]]:
        keys = ("InstanceId", "LifecycleState", "HealthStatus")
        found = [dict(zip(keys, member, strict=True)) for member in self.aws.members]
        yield {"AutoScalingGroups": [{"AutoScalingGroupName": AutoScalingGroupNames[0], "Instances": found}]}


class Instances:
    def __init__(self, aws: Aws) -> None:
        self.aws = aws

    def paginate(self, Filters: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        ids = Filters[0]["Values"]
        self.aws.asked.append(len(ids))
        if len(ids) > MOST_VALUES:
            error = {"Code": "FilterLimitExceeded", "Message": "The maximum number of filter values has been reached"}
            raise ClientError({"Error": error}, "DescribeInstances")
        for begin in range(0, len(ids), 50):
            yield {"Reservations": [{"Instances": [running(one) for one in ids[begin : begin + 50]]}]}


def running(instance_id: str) -> dict[str, Any]:
    return {
        "InstanceId": instance_id,
        "InstanceType": "p5.48xlarge",
        "State": {"Name": "running"},
        "PrivateIpAddress": f"10.0.{int(instance_id[2:]) // 256}.{int(instance_id[2:]) % 256}",
        "Tags": [{"Key": "lustrain:group", "Value": "train"}],
    }


def cluster(via: str = "ssm") -> Cluster:
    nodes = {"auto_scaling_groups": ["train"]}
    return parse(described(backend="ec2", region="us-west-2", reach={"via": via, "user": "ubuntu"}, nodes=nodes))


def test_members_that_are_sick_or_come_and_go_are_left_out_with_a_note() -> None:
    members = [
        ("i-1", "InService", "Healthy"),
        ("i-2", "InService", "Unhealthy"),
        ("i-3", "Terminating:Wait", "Healthy"),
        ("i-4", "Standby", "Healthy"),
        ("i-5", "InService", "HEALTHY"),
    ]
    found, notes = nodes_of(cluster(), Route(), Aws(members))
    assert [node.instance_id for node in found] == ["i-1", "i-5"]
    assert notes == [
        "i-2 left out: InService, unhealthy",
        "i-3 left out: Terminating:Wait, healthy",
        "i-4 left out: Standby, healthy",
    ]


@pytest.mark.parametrize("count", [199, 200, 201, 450])
def test_hundreds_of_instances_are_asked_for_in_as_many_pieces_as_it_takes(count: int) -> None:
    aws = Aws([(f"i-{number}", "InService", "Healthy") for number in range(count)])
    found, notes = nodes_of(cluster(), Route(), aws)
    assert {node.instance_id for node in found} == {f"i-{number}" for number in range(count)}
    assert (notes, sum(aws.asked), max(aws.asked)) == ([], count, min(count, MOST_VALUES))


@pytest.mark.parametrize(
    ("via", "flags", "at_once"), [("ssm", {}, 10), ("ssh", {}, 32), ("ssm", {"max_parallel": "25"}, 25)]
)
def test_fewer_nodes_at_once_over_ssm_where_nobody_says_more(
    via: str, flags: dict[str, str], at_once: int, tmp_path: Path
) -> None:
    members = [(f"i-{number}", "InService", "Healthy") for number in range(40)]

    def look(source: Source) -> Inventory:
        nodes, notes = nodes_of(cluster(via), source.route, Aws(members))
        return Inventory(tuple(nodes), cluster(via), tuple(notes))

    given = Flags(known_hosts=str(tmp_path / "known"), **flags)  # type: ignore[arg-type]
    made = prepare(MockContext(), given, Tuning(), look=look)
    made.close()
    assert (made.pace.max_parallel, len(made.inventory.nodes)) == (at_once, 40)


def test_where_every_member_is_sick_the_line_says_so(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(cluster().model_dump_json(exclude_none=True))
    with pytest.raises(UserError, match="there are no nodes; i-2 left out: InService, unhealthy") as caught:
        inventory(Source(cluster=str(file)), Aws([("i-2", "InService", "Unhealthy")]))
    assert caught.value.exit_code == 3
