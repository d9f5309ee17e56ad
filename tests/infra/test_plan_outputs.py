"""What a deployed cluster tells the rest of the house, and what it tells a person."""

from __future__ import annotations

import json
import shlex
from typing import Any

import boto3
import pytest
from moto import mock_aws

from infra.cluster import parse, to_json
from infra.config import parse as parse_spec
from infra.plan.clients import client_settings
from infra.plan.outputs import Made, cluster
from infra.plan.place import Place, bucket_names
from infra.plan.teardown import empty, first_steps, teardown
from infra.problems import InfraError
from tests.infra.stacks import EXAMPLES, example

PLACE = Place("us-west-2", "123456789012")
LUSTRE = {"id": "fs-0123456789abcdef0", "dns_name": "fs.example", "mount_name": "abcd1234"}
HOME = {"id": "fs-0fedcba9876543210", "dns_name": "home.example"}

HYPERPOD = {"hyperpod_id": "abc", "hyperpod_name": "llm"}
NODES: dict[str, dict[str, Any]] = {
    "ec2": {"auto_scaling_groups": ("train",)},
    "hyperpod-slurm": HYPERPOD,
    "hyperpod-eks": {**HYPERPOD, "eks_name": "llm"},
}


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_contract_survives_json(stack: str) -> None:
    spec = example(stack)
    told = cluster(spec, PLACE, Made(lustre=LUSTRE, home=HOME, **NODES[spec.backend]))
    assert parse(json.loads(json.dumps(to_json(told)))) == told
    assert set(told.groups) == {group.name for group in spec.groups}
    assert (told.lustre is None) == (spec.storage.lustre is None)
    assert told.capacity.ends_at == spec.ends_at


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"addresses": ["10.0.0.1"]}, None),
        ({"hyperpod_cluster": "llm", "kubernetes_label": "a=b"}, None),
        ({}, "names no nodes; allowed: exactly one of auto_scaling_groups"),
        ({"hyperpod_cluster": "llm", "addresses": ["10.0.0.1"]}, "has hyperpod_cluster and addresses"),
        ({"addresses": ["10.0.0.1"], "kubernetes_label": "a=b"}, "has kubernetes_label without hyperpod_cluster"),
    ],
)
def test_nodes_are_found_in_exactly_one_way(nodes: dict[str, Any], said: str | None) -> None:
    told = {**to_json(cluster(example("rehearsal"), PLACE, Made(auto_scaling_groups=("train",)))), "nodes": nodes}
    if said is None:
        assert parse(told)
        return
    with pytest.raises(InfraError, match=said):
        parse(told)


def test_devices_of_a_node_are_those_of_its_type() -> None:
    told = cluster(example("ec2-p6-b300-reservation"), PLACE, Made(auto_scaling_groups=("train",)))
    group = told.groups["train"]
    assert (group.gpus, group.efa, group.accelerator) == (8, 16, "NVIDIA B300")


def test_workers_that_are_paid_for_in_two_ways_are_mixed() -> None:
    spec = example("ec2-spot-g6e")
    two = [*spec.groups, spec.groups[0].model_copy(update={"name": "more", "capacity": {"mode": "on-demand"}})]
    mixed = parse_spec({**spec.model_dump(mode="json"), "groups": [dict(group) for group in two]})
    assert cluster(mixed, PLACE, Made(auto_scaling_groups=("train",))).capacity.mode == "mixed"
    assert cluster(spec, PLACE, Made(auto_scaling_groups=("train",))).capacity.mode == "spot"


def test_client_settings_go_by_the_groups_own_type() -> None:
    spec = example("hyperpod-slurm-p5")
    small, _, large = spec.groups
    assert client_settings(spec, small) != client_settings(spec, large)
    assert client_settings(example("rehearsal"), example("rehearsal").groups[0]) == ({}, {})


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_teardown_names_everything_that_stays(stack: str) -> None:
    spec = example(stack)
    text = "\n".join(teardown(spec, PLACE))
    names = bucket_names(spec, PLACE)
    assert all(f"Bucket('{name}')" in text for name in (names.data, names.checkpoints, names.lifecycle))
    assert ("FSx for Lustre" in text) is bool(spec.storage.lustre)
    assert ("FSx for OpenZFS" in text) is bool(spec.storage.home)
    assert ("pulumi stack output reservations" in text) is any(group.capacity.create for group in spec.groups)


@mock_aws
def test_the_command_for_a_bucket_removes_one_with_old_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket="scripts")
    s3.put_bucket_versioning(Bucket="scripts", VersioningConfiguration={"Status": "Enabled"})
    for body in (b"old", b"new"):
        s3.put_object(Bucket="scripts", Key="on_create.sh", Body=body)
    s3.delete_object(Bucket="scripts", Key="on_create.sh")
    program, flag, code = shlex.split(empty("scripts"))
    assert (program, flag) == (".venv/bin/python", "-c")
    exec(code, {})  # in this process, where the AWS is that answers
    assert s3.list_buckets()["Buckets"] == []


def test_a_bucket_of_the_users_own_is_not_for_removal() -> None:
    spec = example("rehearsal")
    kept = parse_spec({**spec.model_dump(mode="json"), "buckets": {"data": "my-precious"}})
    assert "my-precious" not in "\n".join(teardown(kept, PLACE))


def test_first_steps_are_only_those_that_the_spec_asks_for() -> None:
    assert not any("helm" in line for line in first_steps(example("ec2-spot-g6e"), PLACE))
    assert any("helm upgrade" in line for line in first_steps(example("hyperpod-eks-g6e-spot"), PLACE))
    bare = example("rehearsal").model_copy(
        update={"budget": None, "alarms": example("rehearsal").alarms.model_copy(update={"emails": ()})}
    )
    assert first_steps(bare, PLACE) == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"version": 2}, "cluster.version = 2: not known here; allowed: 1"),
        ([], "cluster is no table"),
        ({"version": 1, "nme": "x"}, "unknown key"),
    ],
)
def test_a_cluster_that_nobody_can_read_is_told_in_a_line(value: object, said: str) -> None:
    with pytest.raises(InfraError) as caught:
        parse(value)
    assert any(said in line for line in caught.value.problems)
