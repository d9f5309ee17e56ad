"""Nodes by hand, from files, and from the embedded AWS, where they come and go between two looks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.local.aws import LocalAws
from lustrain.cluster import Cluster, parse
from lustrain.problem import UserError
from node_setup.fleet.hosts import Route, chosen, parse_host, parse_hosts, parse_lines
from node_setup.fleet.inventory import VARIABLE, Inventory, Source, inventory
from tests.infra.local_network import Network, client
from tests.infra.test_local_hyperpod import in_service, make_role, put_scripts, slurm_cluster

IMAGE = "ami-0123456789abcdef0"


def described(**changes: Any) -> dict[str, Any]:
    return {
        "name": "c",
        "backend": "machines",
        "nodes": {"addresses": ["n1", "n2"]},
        "reach": {"via": "ssh", "user": "ubuntu"},
        "groups": {"train": {"type": "p5.48xlarge", "count": 2}},
        "runs_uri": "/runs",
        "capacity": {"mode": "owned"},
        **changes,
    }


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: Any) -> str:
        file = tmp_path / "cluster.json"
        file.write_text(json.dumps(described(**changes)))
        return str(file)

    return write


def said(source: Source) -> tuple[int, str]:
    with pytest.raises(UserError) as caught:
        inventory(source)
    return caught.value.exit_code, "\n".join(caught.value.problems)


def names(found: Inventory) -> list[str]:
    return [node.name for node in found.nodes]


@pytest.mark.parametrize(
    ("text", "user", "address", "port"),
    [
        ("10.0.0.5", None, "10.0.0.5", None),
        ("ubuntu@node-1.example.com:2222", "ubuntu", "node-1.example.com", 2222),
        ("fd00::5", None, "fd00::5", None),
        ("root@[fd00::5]:22", "root", "fd00::5", 22),
    ],
)
def test_an_address_is_read_as_ssh_reads_it(text: str, user: str | None, address: str, port: int | None) -> None:
    node = parse_host(text, "--nodes")
    assert (node.route.user, node.address, node.route.port) == (user, address, port)


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=x", "a b", "n1:0", "n1:70000", "@n1", "n1:", "n1;reboot", "", "$(x)", "a@b@c"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not an address of a machine"):
        parse_host(text, "--nodes")


@given(st.text(max_size=40))
def test_any_text_is_a_plain_address_or_one_line(text: str) -> None:
    node, problems = None, []
    try:
        node = parse_host(text, "--nodes")
    except UserError as error:
        problems = error.problems
    assert (len(problems), "\n" in "".join(problems)) == ((0, False) if node else (1, False))
    if node:
        assert not node.address.startswith("-")
        assert all(one.isalnum() or one in "._-:%" for one in node.address)


def test_what_an_address_leaves_open_is_as_the_cluster_says(written: Callable[..., str], tmp_path: Path) -> None:
    key = tmp_path / "id"
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    reach = {"via": "ssh", "user": "ubuntu", "key": str(key), "jump": "me@gate"}
    found = inventory(Source(cluster=written(reach=reach, nodes={"addresses": ["n1", "root@n2:2222"]})))
    assert [(one.route.user, one.route.port, one.route.jump) for one in found.nodes] == [
        ("ubuntu", None, "me@gate"),
        ("root", 2222, "me@gate"),
    ]
    assert {(one.group, one.instance_type, one.route.key) for one in found.nodes} == {
        ("train", "p5.48xlarge", str(key))
    }
    flags = Source(cluster=written(reach=reach), nodes="n7", route=Route(user="root"))
    assert [(one.name, one.route.user, one.route.key) for one in inventory(flags).nodes] == [("n7", "root", str(key))]


def test_a_key_that_is_not_there_is_told_before_any_node_is_asked(written: Callable[..., str]) -> None:
    reach = {"via": "ssh", "key": "/no/such/key"}
    assert said(Source(cluster=written(reach=reach))) == (
        2,
        "cluster.reach.key = '/no/such/key': No such file or directory; fix: name a private key",
    )


def test_nodes_named_by_hand_are_of_the_only_group_that_a_cluster_has(written: Callable[..., str]) -> None:
    one = inventory(Source(cluster=written(), nodes="n7"))
    assert [(node.group, node.instance_type) for node in one.nodes] == [("train", "p5.48xlarge")]
    train = described()["groups"]["train"]
    two = inventory(Source(cluster=written(groups={"train": train, "login": {**train, "role": "login"}}), nodes="n7"))
    assert [(node.group, node.instance_type) for node in two.nodes] == [(None, None)]


def test_a_file_that_is_no_private_key_is_told_as_such(tmp_path: Path) -> None:
    public = tmp_path / "id.pub"
    public.write_text("ssh-ed25519 AAAA me\n")
    code, line = said(Source(nodes="n1", route=Route(key=str(public))))
    assert (code, line.partition("': ")[2]) == (
        2,
        "is not a private key; allowed: OpenSSH's format or PEM; fix: name the private key, without .pub",
    )


def test_a_file_of_lines_names_hosts_and_their_groups(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the rack\nn1 train\n\nroot@n2:2222 login # old\nn3\n")
    found = inventory(Source(hosts_file=str(file)))
    assert [(one.name, one.group) for one in found.nodes] == [("n1", "train"), ("n2:2222", "login"), ("n3", None)]
    assert found.cluster is None
    assert names(inventory(Source(hosts_file=str(file), groups=("train",)))) == ["n1"]
    file.write_text("n1 train gpu\n")
    assert said(Source(hosts_file=str(file))) == (
        2,
        f"{file}:1 = 'n1 train gpu': is not a line `host [group]`; allowed: like 10.0.0.5, node1.example.com, "
        "ubuntu@node1:2222 or [fd00::5]:2222",
    )


def test_a_hosts_file_may_be_a_cluster(written: Callable[..., str]) -> None:
    found = inventory(Source(hosts_file=written()))
    assert (names(found), found.cluster and found.cluster.name) == (["n1", "n2"], "c")


def test_the_environment_names_the_cluster_where_no_flag_does(
    written: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, written())
    assert names(inventory(Source())) == ["n1", "n2"]
    by_hand = inventory(Source(nodes="n9"))
    assert (names(by_hand), by_hand.cluster and by_hand.cluster.name) == (["n9"], "c")


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (Source(), 3, "there is no Cluster to take nodes from; fix: give --cluster FILE"),
        (Source(cluster="/no/such.json"), 2, "--cluster = '/no/such.json': No such file"),
        (Source(nodes="n1", local=True), 2, "--nodes and --local name different nodes"),
        (Source(cluster="a", stack="b"), 2, "--cluster and --stack both name a cluster"),
        (Source(nodes="n1,n1"), 2, "--nodes = 'n1': is named twice; fix"),
        (Source(nodes="n1,n2,n1:22"), 2, "--nodes = 'n1:22': is named twice, before as n1"),
        (Source(nodes="n1,root@N1."), 2, "--nodes = 'N1.': is named twice, before as n1"),
        (Source(nodes="fd00::5,[fd00:0:0::5]:22"), 2, "is named twice, before as fd00::5"),
        (Source(nodes=","), 3, "there are no nodes"),
        (Source(nodes="n1", groups=("train",)), 3, "--group = 'train': no node is known to be of this group"),
        (Source(nodes="n1,n2", pattern="x*"), 3, "--node = 'x*': matches no node; allowed: a glob over n1, n2"),
        (Source(hosts_file="/no/such"), 2, "--hosts-file = '/no/such': No such file"),
    ],
)
def test_what_names_no_nodes_is_one_line(source: Source, code: int, words: str) -> None:
    found = said(source)
    assert (found[0], words in found[1], "\n" in found[1]) == (code, True, False), found


def test_two_ports_of_one_address_are_two_nodes() -> None:
    assert names(inventory(Source(nodes="n1:2201,n1:2202,n1"))) == ["n1:2201", "n1:2202", "n1"]


def test_addresses_of_a_cluster_name_a_machine_once(written: Callable[..., str]) -> None:
    code, line = said(Source(cluster=written(nodes={"addresses": ["n1", "ubuntu@n1:22"]})))
    assert (code, line.startswith("cluster.nodes.addresses = 'n1:22': is named twice, before as n1")) == (2, True)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("{instance_id.x}", "holds {instance_id.x}, which is not known here"),
        ("{instance_id[0]}", "holds {instance_id[0]}, which is not known here"),
        ("{instance_id:>999999999}", "holds {instance_id}"),
        ("{}-{instance_id}", "holds {}"),
        ("{name}{instance_id}", "holds {name}"),
        ("{instance_id", "is not a format"),
        ("mi-0123", "is the same for every node"),
        ("x_{group}", "is the same for every node"),
    ],
)
def test_a_target_that_is_no_format_is_one_line_before_aws_is_asked(
    form: str, why: str, written: Callable[..., str]
) -> None:
    pod = {"backend": "hyperpod-slurm", "nodes": {"hyperpod_cluster": "pod"}}
    code, line = said(Source(cluster=written(**pod, reach={"via": "ssm", "ssm_target": form})))
    assert (code, f"reach.ssm_target = {form!r}: {why}" in line, "\n" in line) == (2, True, False), line


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["cluster", "hosts_file"])
def test_a_cluster_with_too_many_levels_is_one_line(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    for depth in (500, *range(850, 1000), 100_000):
        file.write_text('{"name": ' + "[" * depth + "]" * depth + "}")
        code, lines = said(Source(**{flag: str(file)}))
        assert (code, "levels" in lines or "wrong type" in lines) == (2, True), lines[:300]


def test_this_machine_is_only_meant_when_it_is_named(written: Callable[..., str]) -> None:
    assert [node.local for node in inventory(Source(local=True)).nodes] == [True]
    assert [node.local for node in inventory(Source(nodes="localhost")).nodes] == [False]


def test_a_glob_matches_names_addresses_and_instances() -> None:
    nodes = parse_hosts("n1,n2,m3", "--nodes")
    assert [node.name for node in chosen(nodes, pattern="n*")] == ["n1", "n2"]
    lines = parse_lines("n1 a\nn2 b\n", "file")
    assert [node.name for node in chosen(lines, ["b"])] == ["n2"]


def test_without_pulumi_a_stack_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert said(Source(stack="dev"))[1].startswith("pulumi is not on PATH; fix: install it")


PULUMI = """#!/bin/sh
echo "$@" >>"$0.log"
case "$*" in *"--stack gone"*) echo "error: no stack named 'gone' found" >&2; exit 255;; esac
cat "$0.json"
"""
"""Stands for the Pulumi CLI: it gives out a file and keeps its arguments. It leaves out everything else."""


def test_a_stack_gives_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pulumi"
    program.write_text(PULUMI)
    program.chmod(0o755)
    (tmp_path / "pulumi.json").write_text(json.dumps({"cluster": described()}))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PULUMI_BACKEND_URL", f"file://{tmp_path}")
    assert names(inventory(Source(stack="dev"))) == ["n1", "n2"]
    assert "stack output --json --stack dev" in (tmp_path / "pulumi.log").read_text()
    assert said(Source(stack="gone")) == (
        2,
        "pulumi cannot tell the cluster of gone: error: no stack named 'gone' found; "
        "fix: `pulumi up` once, or give --cluster FILE",
    )
    (tmp_path / "pulumi.json").write_text("{")
    assert said(Source(stack="dev"))[1].startswith("stack dev has no output `cluster`")


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


class Sagemaker:
    """Two pages with nodes in every state that the API has; the embedded AWS only knows running ones."""

    def get_paginator(self, name: str) -> Sagemaker:
        assert name == "list_cluster_nodes"
        return self

    def paginate(self, ClusterName: str) -> Iterator[dict[str, Any]]:
        for number, status in enumerate(("Running", "Pending", "Failure", "ShuttingDown", "DeepHealthCheckInProgress")):
            one = {"InstanceGroupName": "train", "InstanceId": f"i-{number}", "InstanceType": "ml.p5.48xlarge"}
            yield {"ClusterNodeSummaries": [one | {"InstanceStatus": {"Status": status}}]}
        pending = {
            "InstanceGroupName": "train",
            "InstanceType": "ml.p5.48xlarge",
            "InstanceStatus": {"Status": "Pending"},
        }
        yield {"ClusterNodeSummaries": [pending]}


def test_nodes_that_do_not_run_are_left_out_with_a_note(written: Callable[..., str]) -> None:
    file = written(backend="hyperpod-slurm", nodes={"hyperpod_cluster": "pod"}, reach={"via": "ssm"})
    found = inventory(Source(cluster=file), lambda service: Sagemaker())
    assert names(found) == ["i-0"]
    assert list(found.notes) == [
        "i-1 left out: Pending",
        "i-2 left out: Failure",
        "i-3 left out: ShuttingDown",
        "i-4 left out: DeepHealthCheckInProgress",
        "train left out: Pending",
    ]
