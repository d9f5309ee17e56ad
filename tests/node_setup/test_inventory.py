"""Nodes by hand, from files, from a stack, and from HyperPod's list."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from node_setup.fleet.hosts import Route, chosen, parse_host, parse_hosts, parse_lines
from node_setup.fleet.inventory import VARIABLE, Inventory, Source, inventory


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
        (Source(nodes="n1", groups=("train",)), 3, "--group = 'train': no node is known to belong to this group"),
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
