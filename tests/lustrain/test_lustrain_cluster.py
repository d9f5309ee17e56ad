"""What a Cluster may say where its words become names, addresses and words of commands."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lustrain.cluster import parse, to_json
from lustrain.problem import UserError

CLUSTER: dict[str, Any] = {
    "name": "train",
    "backend": "machines",
    "nodes": {"addresses": ["10.0.0.1"]},
    "reach": {"via": "ssh", "user": "ubuntu", "jump": "me@bastion.example.com:2222"},
    "groups": {"train": {"type": "p5.48xlarge", "count": 1}},
    "buckets": {"data": "team-data", "checkpoints": "team.checkpoints", "lifecycle": "sagemaker-team"},
    "runs_uri": "s3://team.checkpoints/runs/",
    "capacity": {"mode": "owned"},
    "slurm": {"controller_group": "train", "account": "research", "qos": "high"},
    "kubernetes": {"context": "kind-lab", "namespace": "research", "service_account": "trainer"},
    "image_repository": "123456789012.dkr.ecr.us-east-1.amazonaws.com/team/trainer",
}
LEAVES = ("name", "reach.user", "reach.jump", "buckets.data", "buckets.checkpoints", "runs_uri", "image_repository")
LEAVES += ("slurm.account", "slurm.qos", "kubernetes.context", "kubernetes.namespace", "kubernetes.service_account")


def edited(path: str, value: object) -> dict[str, Any]:
    cluster = copy.deepcopy(CLUSTER)
    table, _, key = path.rpartition(".")
    (cluster[table] if table else cluster)[key] = value
    return cluster


def test_names_addresses_and_repositories_are_taken() -> None:
    assert parse(CLUSTER).name == "train"
    for path, value in (
        ("reach.jump", "bastion"),
        ("reach.jump", "me@[::1]"),
        ("runs_uri", "/fsx/runs"),
        ("runs_uri", "runs"),
        ("image_repository", "127.0.0.1:5000/team/trainer"),
    ):
        parse(edited(path, value))


@pytest.mark.parametrize(
    "address",
    ["10.0.0.5", "node_1.example.com", "ubuntu@node1:2222", "fd00::5", "::1", "[fd00::5]:2222", "0db8::10.0.0.5"],
)
def test_addresses_of_machines_are_taken(address: str) -> None:
    assert parse(edited("nodes.addresses", [address])).nodes.addresses == (address,)


@pytest.mark.parametrize(
    "address", ["", "a,b", "-oProxyCommand=x", "-x@a", "a b", "a%h", "fe80::1%$x", "$(reboot)", "a;b", "me@", "a:b"]
)
def test_address_that_is_a_list_or_an_option_is_refused(address: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(edited("nodes.addresses", [address]))
    assert [line.startswith("cluster.nodes.addresses") for line in caught.value.problems] == [True]


HOSTILE = ("", "-oProxyCommand=x", "a b", "\x1b[2J", "a\nb")
FOR_A_SHELL = ("$(reboot)", "a;b", "`x`")
ANYTHING = ("runs_uri", "kubernetes.context")
"""A folder of runs and a context may be called so: they are never words of a shell."""


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path in LEAVES for value in (*HOSTILE, *(() if path in ANYTHING else FOR_A_SHELL))],
)
def test_no_text_that_a_command_could_take_for_more_than_a_word(path: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(edited(path, value))
    (line,) = caught.value.problems
    assert line.startswith(f"cluster.{path} = ")
    assert line.isprintable()


def test_an_output_of_an_older_cluster_is_still_read() -> None:
    """Without what launchers were given later, and written back without it."""
    older = {key: value for key, value in CLUSTER.items() if key not in ("slurm", "kubernetes")}
    cluster = parse(older)
    assert (cluster.slurm, cluster.kubernetes, cluster.groups["train"].capacity) == (None, None, None)
    assert parse(to_json(cluster)) == cluster


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"backend": "hyperpod-eks"}, "has slurm with backend hyperpod-eks; allowed: hyperpod-slurm, ec2, machines"),
        ({"nodes": {"addresses": ["a"], "instances": ["i-0123456789abcdef0"]}}, "has instances without"),
        ({"backend": "ec2", "slurm": None}, "has kubernetes with backend ec2; allowed: hyperpod-eks, machines"),
        ({"slurm": {"controller_group": "head"}}, "has no group head, which slurm.controller_group names"),
        ({"kubernetes": {"claims": {"fsx": "team"}}}, "fsx"),
        ({"kubernetes": {"claims": {"/fsx": "Team_Data"}}}, "Team_Data"),
    ],
)
def test_a_place_for_jobs_that_cannot_be_is_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse({**CLUSTER, **change})
    (problem,) = caught.value.problems
    assert line in problem
