"""Nodes by hand, from files, from a stack, and from HyperPod's list."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.cluster import parse
from lustrain.deployed import VARIABLE
from lustrain.problem import UserError
from node_setup.fleet.hosts import Route, parse_host
from node_setup.fleet.inventory import Inventory, Source, ended_instances, inventory


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


PUBLIC = str(Path(__file__).with_name("conftest.py"))
"""A file that holds no key."""


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
    "text", ["-oProxyCommand=x", "a b", "n1:0", "n1:65536", "n1:70000", "@n1", "n1:", "n1;reboot", "", "$(x)", "a@b@c"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not an address of a machine"):
        parse_host(text, "--nodes")


@given(st.text(max_size=40))
def test_any_text_is_a_plain_address_or_one_line(text: str) -> None:
    address, problems = "", list[str]()
    try:
        address = parse_host(text, "--nodes").address
    except UserError as error:
        problems = list(error.problems)
    assert [line.count("\n") for line in problems] == ([] if address else [0])
    assert not address.startswith("-")
    assert all(one.isalnum() or one in "._-:%" for one in address)


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


@pytest.mark.parametrize(
    ("roles", "known"), [(["worker"], ("worker", "p5.48xlarge")), (["worker", "login"], (None, None))]
)
def test_nodes_named_by_hand_belong_to_the_only_group(
    roles: list[str], known: tuple[str | None, str | None], written: Callable[..., str]
) -> None:
    groups = {role: {"type": "p5.48xlarge", "count": 2, "role": role} for role in roles}
    [node] = inventory(Source(cluster=written(groups=groups), nodes="n7")).nodes
    assert (node.group, node.instance_type) == known


def test_hosts_file_has_lines_of_hosts_or_is_a_cluster(tmp_path: Path, written: Callable[..., str]) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the rack\nn1 train\n\nroot@n2:2222 login # old\nn3\n")
    found = inventory(Source(hosts_file=str(file)))
    assert [(one.name, one.group) for one in found.nodes] == [("n1", "train"), ("n2:2222", "login"), ("n3", None)]
    assert found.cluster is None
    assert names(inventory(Source(hosts_file=str(file), groups=("train",)))) == ["n1"]
    assert names(inventory(Source(hosts_file=str(file), pattern="n[23]*"))) == ["n2:2222", "n3"]
    for wrong in ("n1 train gpu", "worker-1 slots=8"):
        file.write_text(f"{wrong}\n")
        code, line = said(Source(hosts_file=str(file)))
        assert (code, line.startswith(f"{file}:1 = {wrong!r}: is not a line")) == (2, True)
    found = inventory(Source(hosts_file=written()))
    assert (names(found), found.cluster and found.cluster.name) == (["n1", "n2"], "c")


def test_the_environment_names_the_cluster_where_no_flag_does(
    written: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, written())
    assert names(inventory(Source())) == ["n1", "n2"]
    by_hand = inventory(Source(nodes="n9"))
    assert (names(by_hand), by_hand.cluster and by_hand.cluster.name) == (["n9"], "c")


def test_group_of_a_hosts_file_must_exist_in_the_cluster(
    tmp_path: Path, written: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, written(groups={"train": {"type": "p5.48xlarge", "count": 2}}))
    (tmp_path / "hosts").write_text("n1 train\nn2\n")
    found = inventory(Source(hosts_file=str(tmp_path / "hosts"))).nodes
    assert [(one.name, one.group) for one in found] == [("n1", "train"), ("n2", "train")]
    (tmp_path / "hosts").write_text("n1 other\n")
    code, line = said(Source(hosts_file=str(tmp_path / "hosts")))
    assert (code, line.startswith("group of n1 = 'other': ")) == (2, True)


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
        (Source(nodes="n1", groups=("train",)), 3, "--group = 'train': no node is known to belong to this group"),
        (Source(nodes="n1,n2", pattern="x*"), 3, "--node = 'x*': matches no node; allowed: a glob over n1, n2"),
        (Source(hosts_file="/no/such"), 2, "--hosts-file = '/no/such': No such file"),
        (Source(nodes="n1", route=Route(key=PUBLIC)), 2, f"--key = '{PUBLIC}': is not a private key"),
    ],
)
def test_what_names_no_nodes_is_one_line(source: Source, code: int, words: str) -> None:
    found = said(source)
    assert (found[0], words in found[1], "\n" in found[1]) == (code, True, False), found


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"reach": {"via": "ssh", "key": "/no/such/key"}}, "cluster.reach.key = '/no/such/key': No such file"),
        ({"nodes": {"addresses": ["n1", "ubuntu@n1:22"]}}, "cluster.nodes.addresses = 'n1:22': is named twice"),
    ],
)
def test_cluster_mistakes_are_reported_before_any_node_call(
    changes: dict[str, Any], line: str, written: Callable[..., str]
) -> None:
    code, found = said(Source(cluster=written(**changes)))
    assert (code, found.startswith(line)) == (2, True)


def test_two_ports_are_two_nodes_and_local_must_be_named() -> None:
    assert names(inventory(Source(nodes="n1:2201,n1:2202,n1"))) == ["n1:2201", "n1:2202", "n1"]
    assert [node.local for node in inventory(Source(local=True)).nodes] == [True]
    assert [node.local for node in inventory(Source(nodes="localhost")).nodes] == [False]


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
def test_malformed_ssm_target_is_one_line_before_any_aws_call(form: str, why: str, written: Callable[..., str]) -> None:
    pod = {"backend": "hyperpod-slurm", "nodes": {"hyperpod_cluster": "pod"}}
    code, line = said(Source(cluster=written(**pod, reach={"via": "ssm", "ssm_target": form})))
    assert (code, f"reach.ssm_target = {form!r}: {why}" in line, "\n" in line) == (2, True, False), line


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["cluster", "hosts_file"])
def test_a_cluster_with_too_many_levels_is_one_line(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    for depth in (500, *range(850, 1000), 100_000):
        file.write_text('{"name": ' + "[" * depth + "]" * depth + "}")
        given: dict[str, Any] = {flag: str(file)}
        code, lines = said(Source(**given))
        assert (code, "levels" in lines or "wrong type" in lines) == (2, True), lines[:300]


PULUMI = """#!/bin/sh
echo "$@" >>"$0.log"
case "$*" in *"--stack gone"*) echo "error: no stack named 'gone' found" >&2; exit 255;; esac
cat "$0.json"
"""
"""Stands for the Pulumi CLI: it gives out a file and keeps its arguments. It leaves out everything else."""


def test_a_stack_gives_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert said(Source(stack="dev"))[1].startswith("pulumi is not on PATH; fix: install it")
    program = tmp_path / "pulumi"
    program.write_text(PULUMI)
    program.chmod(0o755)
    (tmp_path / "pulumi.json").write_text(json.dumps({"cluster": described()}))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PULUMI_BACKEND_URL", f"file://{tmp_path}")
    assert names(inventory(Source(stack="dev"))) == ["n1", "n2"]
    assert "stack output --json --stack dev" in (tmp_path / "pulumi.log").read_text()
    code, line = said(Source(stack="gone"))
    assert (code, line.startswith("pulumi cannot read the cluster of gone: error: no stack named 'gone'")) == (2, True)
    (tmp_path / "pulumi.json").write_text("{")
    assert said(Source(stack="dev"))[1].startswith("stack dev has no output `cluster`")


class Sagemaker:
    """Pages with nodes in every state that the API has; the embedded AWS only knows running ones."""

    def get_paginator(self, name: str) -> Sagemaker:
        assert name == "list_cluster_nodes"
        return self

    def paginate(self, ClusterName: str) -> Iterator[dict[str, Any]]:
        for number, status in enumerate(("Running", "Pending", "Failure", "ShuttingDown", "DeepHealthCheckInProgress")):
            yield self._page(status, InstanceId=f"i-{number}")
        yield self._page("Pending")

    def _page(self, status: str, **more: str) -> dict[str, Any]:
        one = {"InstanceGroupName": "train", "InstanceType": "ml.p5.48xlarge", "InstanceStatus": {"Status": status}}
        return {"ClusterNodeSummaries": [{**one, **more}]}


class Ec2:
    """One page with an instance in every state; https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceState.html"""

    def get_paginator(self, name: str) -> Ec2:
        assert name == "describe_instances"
        return self

    def paginate(self, Filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        states = ("pending", "running", "shutting-down", "terminated", "stopping", "stopped")
        yield {"Reservations": [{"Instances": [{"InstanceId": one, "State": {"Name": one}} for one in states]}]}


def test_instance_has_ended_once_it_runs_nothing_or_is_forgotten() -> None:
    cluster = parse(described(backend="ec2", nodes={"auto_scaling_groups": ["a"]}))
    ids = ["pending", "running", "shutting-down", "terminated", "stopping", "stopped", "forgotten"]
    assert ended_instances(cluster, ids, lambda service: Ec2()) == {"terminated", "stopped", "forgotten"}


class Stack(Ec2):
    """An EC2 and Auto Scaling with a group's instance, and a controller's beside it."""

    def get_paginator(self, name: str) -> Stack:
        return self

    def paginate(self, **asked: Any) -> Iterator[dict[str, Any]]:
        if "AutoScalingGroupNames" in asked:
            member = {"InstanceId": "i-0a", "LifecycleState": "InService", "HealthStatus": "Healthy"}
            yield {"AutoScalingGroups": [{"AutoScalingGroupName": "a", "Instances": [member]}]}
            return
        groups = {"i-0a": "train", "i-00000000000000c0": "controller"}
        some = [
            {"InstanceId": one, "InstanceType": "m7i.large", "State": {"Name": "running"}, "PrivateDnsName": f"{one}.internal",
             "Tags": [{"Key": "lustrain:group", "Value": groups[one]}]}
            for one in asked["Filters"][0]["Values"]
        ]  # fmt: skip
        yield {"Reservations": [{"Instances": some}]}


def test_instances_beside_the_groups_are_nodes_too(written: Callable[..., str]) -> None:
    groups = {
        "train": {"type": "p5.48xlarge", "count": 1},
        "controller": {"type": "m7i.large", "count": 1, "role": "controller"},
    }
    nodes = {"auto_scaling_groups": ["a"], "instances": ["i-00000000000000c0"]}
    file = written(backend="ec2", nodes=nodes, groups=groups)
    assert names(inventory(Source(cluster=file), lambda service: Stack())) == ["i-00000000000000c0", "i-0a"]
    only = inventory(Source(cluster=file, groups=("controller",)), lambda service: Stack())
    assert names(only) == ["i-00000000000000c0"]


def test_nodes_that_do_not_run_are_left_out_with_a_note(written: Callable[..., str]) -> None:
    file = written(backend="hyperpod-slurm", nodes={"hyperpod_cluster": "pod"}, reach={"via": "ssm"})
    found = inventory(Source(cluster=file), lambda service: Sagemaker())
    assert names(found) == ["i-0"]
    states = ("i-1: Pending", "i-2: Failure", "i-3: ShuttingDown", "i-4: DeepHealthCheckInProgress", "train: Pending")
    assert list(found.notes) == [one.replace(":", " left out:") for one in states]
