"""Nodes from the embedded AWS, where they come and go between two looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.local.aws import LocalAws
from lustrain.cluster import Cluster, parse
from lustrain.problem import UserError
from node_setup.fleet.inventory import VARIABLE, Inventory, Source, inventory
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
def gang(aws: LocalAws) -> Callable[..., Any]:
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
def test_instances_of_a_gang_come_and_go_between_two_runs(aws: LocalAws, gang: Any, tmp_path: Path) -> None:
    scaling = gang("come-and-go", 3)
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
def test_many_instances_are_found_over_all_pages(gang: Any, tmp_path: Path) -> None:
    gang("many", 130)
    found = look(in_aws(nodes={"auto_scaling_groups": ["many"]}), tmp_path)
    assert len(set(names(found))) == 130
    assert len({node.instance_id for node in found.nodes}) == 130


@pytest.mark.slow
@pytest.mark.usefixtures("asking_it")
def test_over_ssh_an_instance_is_its_address(gang: Any, tmp_path: Path) -> None:
    gang("by-address", 1)
    cluster = in_aws(nodes={"auto_scaling_groups": ["by-address"]}).model_copy(
        update={"reach": parse(described()).reach}
    )
    (node,) = look(cluster, tmp_path).nodes
    assert (node.address.startswith("10."), node.route.proxy, node.key_name) == (True, (), node.instance_id)


@pytest.mark.slow
@pytest.mark.usefixtures("asking_it")
def test_a_gang_that_is_gone_and_an_aws_that_does_not_answer_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    sagemaker.batch_replace_cluster_nodes(ClusterName="pod", NodeIds=[worker.instance_id])
    second = look(cluster, tmp_path)
    before, after = ({node.instance_id for node in found.nodes} for found in (first, second))
    assert (len(after), before - after) == (5, {worker.instance_id})
    sagemaker.batch_delete_cluster_nodes(ClusterName="pod", NodeIds=[second.nodes[1].instance_id])
    third = look(cluster, tmp_path, groups=("train",))
    assert len(third.nodes) == 3
