"""Nodes from the embedded AWS, where they come and go between two looks, and from answers that it does not give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from invoke.context import MockContext

from infra.local.aws import LocalAws
from lustrain.cluster import Cluster, parse
from lustrain.deployed import VARIABLE
from lustrain.problem import UserError
from node_setup.fleet.flags import Flags
from node_setup.fleet.hosts import Route
from node_setup.fleet.inventory import Inventory, Source, inventory, nodes_of
from node_setup.fleet.run import prepare
from node_setup.request import Tuning
from tests.infra.local_network import Network, client
from tests.infra.test_local_hyperpod import in_service, make_role, put_scripts, slurm_cluster
from tests.node_setup.test_inventory import described, names

IMAGE = "ami-0123456789abcdef0"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def aws() -> Iterator[LocalAws]:
    with LocalAws() as server:
        yield server


@pytest.fixture
def asking_it(aws: LocalAws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)


def in_aws(**changes: Any) -> Cluster:
    reach = {"via": "ssm", "user": "ubuntu", "ssm_target": "{instance_id}"}
    return parse(described(backend="ec2", region="us-west-2", reach=reach, **changes))


def look(cluster: Cluster, tmp_path: Path, **more: Any) -> Inventory:
    file = tmp_path / "aws.json"
    file.write_text(cluster.model_dump_json(exclude_none=True))
    return inventory(Source(cluster=str(file), **more))


@pytest.fixture
def scaling_group(aws: LocalAws) -> Callable[..., Any]:
    """An Auto Scaling group whose instances carry the group's tag, as `pulumi up` makes it."""
    network, scaling = Network(aws), client(aws, "autoscaling")

    def make(name: str, count: int) -> Any:
        data = {"ImageId": IMAGE, "InstanceType": "g6e.8xlarge", "SecurityGroupIds": [network.group]}
        made = network.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)["LaunchTemplate"]
        scaling.create_auto_scaling_group(
            AutoScalingGroupName=name,
            LaunchTemplate={"LaunchTemplateId": made["LaunchTemplateId"], "Version": "1"},
            VPCZoneIdentifier=network.subnet,
            MinSize=0,
            MaxSize=200,
            DesiredCapacity=count,
            Tags=[{"Key": "lustrain:group", "Value": "train", "PropagateAtLaunch": True}],
        )
        return scaling

    return make


@pytest.mark.slow
@pytest.mark.usefixtures("asking_it")
def test_instances_come_and_go_between_two_runs(aws: LocalAws, scaling_group: Any, tmp_path: Path) -> None:
    scaling = scaling_group("come-and-go", 3)
    cluster = in_aws(nodes={"auto_scaling_groups": ["come-and-go"]})
    first = look(cluster, tmp_path)
    assert [(one.group, one.instance_type) for one in first.nodes] == [("train", "g6e.8xlarge")] * 3
    one = first.nodes[0]
    assert one.route.proxy == (
        "aws", "ssm", "start-session", "--target", one.instance_id, "--document-name", "AWS-StartSSHSession",
        "--parameters", "portNumber=22", "--region", "us-west-2",
    )  # fmt: skip
    assert (one.address, one.route.user) == (one.instance_id, "ubuntu")
    scaling.terminate_instance_in_auto_scaling_group(InstanceId=one.instance_id, ShouldDecrementDesiredCapacity=False)
    second = look(cluster, tmp_path)
    before, after = ({node.instance_id for node in found.nodes} for found in (first, second))
    assert len(after) == 3
    assert before - after == {one.instance_id}
    assert len(after - before) == 1
    client(aws, "ec2").stop_instances(InstanceIds=[second.nodes[0].instance_id])
    third = look(cluster, tmp_path)
    assert (len(third.nodes), third.notes) == (2, (f"{second.nodes[0].instance_id} left out: stopped",))
    named = look(cluster, tmp_path, nodes=str(third.nodes[1].instance_id))
    assert names(named) == [third.nodes[1].name]
    scaling.update_auto_scaling_group(AutoScalingGroupName="come-and-go", MinSize=0, MaxSize=0, DesiredCapacity=0)
    with pytest.raises(UserError, match="there are no nodes") as caught:
        look(cluster, tmp_path)
    assert caught.value.exit_code == 3


@pytest.mark.slow
@pytest.mark.usefixtures("asking_it")
def test_missing_scaling_group_and_silent_aws_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no such Auto Scaling group") as caught:
        look(in_aws(nodes={"auto_scaling_groups": ["never"]}), tmp_path)
    assert caught.value.exit_code == 3
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError, match="AWS cannot list the cluster's nodes: Could not connect"):
        look(in_aws(nodes={"auto_scaling_groups": ["never"]}), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("asking_it")
def test_nodes_of_hyperpod_come_and_go_between_two_runs(aws: LocalAws, tmp_path: Path) -> None:
    sagemaker = client(aws, "sagemaker")
    put_scripts(aws)
    request = slurm_cluster("pod", Network(aws), make_role(aws, "pod-node", "sagemaker.amazonaws.com"))
    sagemaker.create_cluster(**request)
    in_service(sagemaker, "pod")
    reach = {"via": "ssm", "user": "ubuntu", "ssm_target": "sagemaker-cluster:abc123_{group}-{instance_id}"}
    cluster = parse(
        described(backend="hyperpod-slurm", region="us-west-2", nodes={"hyperpod_cluster": "pod"}, reach=reach)
    )
    first = look(cluster, tmp_path)
    assert [(one.group, one.instance_type) for one in first.nodes] == [
        ("controller", "c5.2xlarge"),
        *[("train", "p5en.48xlarge")] * 4,
    ]
    worker = first.nodes[1]
    assert f"sagemaker-cluster:abc123_train-{worker.instance_id}" in worker.route.proxy
    aws.events.node_fault("pod", str(worker.instance_id), "us-west-2")
    second = look(cluster, tmp_path)
    before, after = ({node.instance_id for node in found.nodes} for found in (first, second))
    assert (len(after), before - after) == (5, {worker.instance_id})
    third = look(cluster, tmp_path, groups=("train",))
    assert len(third.nodes) == 4


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
        return SimpleNamespace(paginate={"describe_instances": self.instances}.get(name, self.groups))

    def groups(self, AutoScalingGroupNames: Sequence[str]) -> Iterator[dict[str, Any]]:
        keys = ("InstanceId", "LifecycleState", "HealthStatus")
        found = [dict(zip(keys, member, strict=True)) for member in self.members]
        yield {"AutoScalingGroups": [{"AutoScalingGroupName": AutoScalingGroupNames[0], "Instances": found}]}

    def instances(self, Filters: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        ids = Filters[0]["Values"]
        self.asked.append(len(ids))
        if len(ids) > MOST_VALUES:
            raise ClientError({"Error": {"Code": "FilterLimitExceeded", "Message": "too many"}}, "DescribeInstances")
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


def test_unhealthy_or_leaving_members_are_left_out_with_a_note() -> None:
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
def test_hundreds_of_instances_are_requested_in_batches(count: int) -> None:
    aws = Aws([(f"i-{number}", "InService", "Healthy") for number in range(count)])
    found, notes = nodes_of(cluster(), Route(), aws)
    assert {node.instance_id for node in found} == {f"i-{number}" for number in range(count)}
    assert (notes, sum(aws.asked), max(aws.asked)) == ([], count, min(count, MOST_VALUES))


def test_over_ssh_an_instance_is_its_address() -> None:
    [node], _ = nodes_of(cluster("ssh"), Route(), Aws([("i-1", "InService", "Healthy")]))
    assert (node.address, node.route.proxy, node.key_name) == ("10.0.0.1", (), "i-1")


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
    made = prepare(MockContext(), given, Tuning(), list_nodes=look)
    made.close()
    assert (made.concurrency.max_parallel, len(made.inventory.nodes)) == (at_once, 40)


def test_where_every_member_is_sick_the_line_says_so(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(cluster().model_dump_json(exclude_none=True))
    with pytest.raises(UserError, match="there are no nodes; i-2 left out: InService, unhealthy") as caught:
        inventory(Source(cluster=str(file)), Aws([("i-2", "InService", "Unhealthy")]))
    assert caught.value.exit_code == 3
