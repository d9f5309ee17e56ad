"""What a deployed cluster tells the rest of the house, and what it tells a person."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

from infra.config import parse as parse_spec
from infra.plan.nodes.bundle import DOCUMENT, bundle
from infra.plan.outputs import Made, cluster
from infra.plan.place import Place, bucket_names
from infra.plan.stack import Plan
from infra.plan.teardown import empty, first_steps, teardown
from infra.preflight.offline import run_in
from infra.preflight.rule import Context
from lustrain.cluster import Cluster, Kubernetes, Paid, Slurm, Taint, node_document, parse, to_json
from lustrain.problem import UserError
from tests.infra.edits import spec_of
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
    told = cluster(Plan(spec, PLACE), Made(lustre=LUSTRE, home=HOME, **NODES[spec.backend]))
    assert parse(json.loads(json.dumps(to_json(told)))) == told
    assert set(told.groups) == {group.name for group in spec.groups}
    assert (told.lustre is None) == (spec.storage.lustre is None)
    assert told.capacity.ends_at == spec.ends_at


def told(stack: str) -> Cluster:
    spec = example(stack)
    return cluster(Plan(spec, PLACE), Made(lustre=LUSTRE, home=HOME, **NODES[spec.backend]))


def test_launchers_hear_of_slurm_and_kubernetes_what_the_spec_knows() -> None:
    slurm, eks, ec2 = told("hyperpod-slurm-p5"), told("hyperpod-eks-g6e-spot"), told("ec2-spot-g6e")
    assert (slurm.slurm, slurm.kubernetes) == (Slurm(controller_group="controller"), None)
    assert {name: group.partition for name, group in slurm.groups.items() if group.role == "worker"} == {
        "train": "train"
    }
    assert {group.partition for group in slurm.groups.values() if group.role != "worker"} == {None}
    assert eks.kubernetes == Kubernetes(context="arn:aws:eks:us-west-2:123456789012:cluster/llm")
    workers = eks.groups["spot"]
    assert (workers.labels, workers.taints) == (
        {"lustrain.dev/role": "worker"},
        (Taint(key="lustrain.dev/spot", value="true"),),
    )
    assert workers.capacity == Paid(mode="spot")
    assert (ec2.slurm, ec2.kubernetes) == (None, None)


@pytest.mark.parametrize("stack", EXAMPLES)
def test_each_group_says_how_it_is_paid_for_and_until_when(stack: str) -> None:
    assert {name: group.capacity for name, group in told(stack).groups.items()} == {
        group.name: Paid(mode=group.capacity.mode, ends_at=group.capacity.ends_at) for group in example(stack).groups
    }


def through_pulumi(stack: str, **edits: Any) -> Cluster:
    """The stack's cluster as `pulumi stack output` prints it: the engine knows no whole numbers, and none in `4800.0`."""
    spec = spec_of(stack, edits)
    told = to_json(cluster(Plan(spec, PLACE), Made(lustre=LUSTRE, home=HOME, **NODES[spec.backend])))

    def as_printed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: as_printed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [as_printed(one) for one in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return parse(json.loads(json.dumps(as_printed(told))))


TUNINGS: list[dict[str, Any]] = [{}, {"profiles": {"train": "cpu"}, "settings": {"clock.chrony": False, "a.b": 64}}]


@pytest.mark.parametrize("stack", EXAMPLES)
@pytest.mark.parametrize("tuning", TUNINGS, ids=["as it is", "tuned"])
def test_a_node_hears_the_same_at_boot_and_from_whoever_holds_the_cluster(stack: str, tuning: dict[str, Any]) -> None:
    files = {file.path: file.content for file in bundle(spec_of(stack, {"tuning": tuning})).files}
    told = node_document(through_pulumi(stack, tuning=tuning))
    assert (json.dumps(told, sort_keys=True, indent=1) + "\n").encode() == files[DOCUMENT]


def test_the_node_document_says_what_a_node_needs_and_nothing_else() -> None:
    assert node_document(through_pulumi("ec2-spot-g6e", tuning={"settings": {"clock.chrony": False}})) == {
        "version": 1,
        "cluster": "spot-g6e",
        "backend": "ec2",
        "groups": {
            "train": {"type": "g6e.48xlarge", "role": "worker", "gpus": 8, "efa": 4, "nvme": 4, "lustre_efa": 0}
        },
        "lustre": {
            "path": "/fsx",
            "efa": False,
            "throughput_mb_s": 1200.0,
            "stripes": [
                {
                    "path": "/fsx/checkpoints",
                    "options": ["-E", "100M", "-c", "1", "-E", "10G", "-c", "8", "-E", "-1", "-c", "-1", "-S", "16M"],
                    "why": "shards over all targets, the small files beside them on one",
                },
                {
                    "path": "/fsx/containers",
                    "options": ["-c", "-1", "-S", "16M"],
                    "why": "one large image that every node reads",
                },
                {"path": "/fsx/logs", "options": ["-c", "1"], "why": "small files that grow line by line"},
            ],
        },
        "mount": None,
        "tuning": {"profiles": {}, "settings": {"clock.chrony": "off"}},
    }


def test_only_machines_that_are_there_already_are_told_what_to_mount() -> None:
    deployed = to_json(through_pulumi("ec2-spot-g6e"))
    assert node_document(parse(deployed))["mount"] is None
    machines = {**deployed, "backend": "machines", "nodes": {"addresses": ["10.0.0.1"]}}
    assert node_document(parse(machines))["mount"] == {"dns_name": "fs.example", "mount_name": "abcd1234"}
    assert node_document(parse({**machines, "lustre": None}))["mount"] is None


def test_a_node_of_eks_is_not_told_of_a_file_system_that_only_its_pods_mount() -> None:
    cluster = through_pulumi("hyperpod-eks-g6e-spot", **{"storage.lustre": {"capacity_tib": 1.2}})
    assert cluster.lustre is not None
    assert node_document(cluster)["lustre"] is None


def test_a_cluster_from_before_there_was_tuning_reads() -> None:
    now = to_json(through_pulumi("ec2-spot-g6e"))
    before = {**now, "lustre": {**now["lustre"], "modules": {"ptlrpc": "a=1"}, "parameters": {"osc.*.a": "1"}}}
    assert before.pop("tuning") == {"profiles": {}, "settings": {}}
    assert parse(before) == parse(now)
    with pytest.raises(UserError, match=r"cluster\.lustre\.strips"):
        parse({**before, "lustre": {**before["lustre"], "strips": []}})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("on", "on"), ("off", "off"), ("true", "on"), ("524288", "524288"), ("5.0", "5"), ("0.5", "0.5"), ("'08'", "08")],
)
def test_a_setting_is_what_the_user_wrote_however_yaml_takes_it(written: str, meant: str) -> None:
    value = yaml.safe_load(f"a: {written}")
    assert spec_of("rehearsal", {"tuning.settings": value}).tuning.settings == {"a": meant}


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
    told = {**to_json(cluster(Plan(example("rehearsal"), PLACE), Made(auto_scaling_groups=("train",)))), "nodes": nodes}
    if said is None:
        assert parse(told)
        return
    with pytest.raises(UserError, match=said):
        parse(told)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", "/fs x\n[Mount]"),
        ("path", "/fsx\n"),
        ("path", "fsx"),
        ("path", "/"),
        ("path", "/fsx/../etc"),
        ("path", "/-fsx"),
        ("path", "/fsx%i"),
        ("dns_name", "fs.example\nOptions=suid"),
        ("mount_name", "ab cd"),
    ],
)
def test_what_is_mounted_is_text_that_a_unit_can_hold(key: str, value: str) -> None:
    now = to_json(through_pulumi("ec2-spot-g6e"))
    with pytest.raises(UserError) as caught:
        parse({**now, "lustre": {**now["lustre"], key: value}})
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(
        f"cluster.lustre.{key} = {value!r}: {'holds' if not value.isprintable() else 'is not a'}"
    )


def test_what_the_spec_lets_be_mounted_the_cluster_does_too() -> None:
    for path in ("/fsx", "/shared/data-1", "/a.b_c"):
        assert through_pulumi("ec2-spot-g6e", **{"storage.lustre.mount_path": path}).lustre.path == path
    for path in ("/.fsx", "/-x", "/fsx/...", "/"):
        with pytest.raises(UserError, match="plain absolute path"):
            spec_of("ec2-spot-g6e", {"storage.lustre.mount_path": path})


@pytest.mark.parametrize("key", ["storage.lustre.mount_path", "storage.home.mount_path"])
@pytest.mark.parametrize("path", ["/fsx/../etc", "/./fsx", "/.."])
def test_a_mount_path_that_leads_elsewhere_is_an_error_of_preflight(key: str, path: str) -> None:
    spec = spec_of("ec2-spot-g6e", {key: path})
    found = run_in(Context.of_region(spec, "us-east-1", datetime.now(UTC)))
    assert [one for one in found if one.level == "error" and one.path == key]


def test_devices_of_a_node_are_those_of_its_type() -> None:
    told = cluster(Plan(example("ec2-p6-b300-reservation"), PLACE), Made(auto_scaling_groups=("train",)))
    group = told.groups["train"]
    assert (group.gpus, group.efa, group.accelerator) == (8, 16, "NVIDIA B300")


def test_workers_that_are_paid_for_in_two_ways_are_mixed() -> None:
    spec = example("ec2-spot-g6e")
    two = [*spec.groups, spec.groups[0].model_copy(update={"name": "more", "capacity": {"mode": "on-demand"}})]
    mixed = parse_spec({**spec.model_dump(mode="json"), "groups": [dict(group) for group in two]})
    assert cluster(Plan(mixed, PLACE), Made(auto_scaling_groups=("train",))).capacity.mode == "mixed"
    assert cluster(Plan(spec, PLACE), Made(auto_scaling_groups=("train",))).capacity.mode == "spot"


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_teardown_names_everything_that_stays(stack: str) -> None:
    spec = example(stack)
    text = "\n".join(teardown(Plan(spec, PLACE)))
    names = bucket_names(spec, PLACE)
    assert all(f"Bucket('{name}')" in text for name in (names.data, names.checkpoints, names.lifecycle))
    assert ("FSx for Lustre" in text) is bool(spec.storage.lustre)
    assert ("FSx for OpenZFS" in text) is bool(spec.storage.home)
    assert ("pulumi stack output reservations" in text) is any(group.capacity.create for group in spec.groups)


@pytest.mark.slow
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
    assert "my-precious" not in "\n".join(teardown(Plan(kept, PLACE)))


def test_first_steps_are_only_those_that_the_spec_asks_for() -> None:
    assert not any("helm" in line for line in first_steps(Plan(example("ec2-spot-g6e"), PLACE)))
    assert any("helm upgrade" in line for line in first_steps(Plan(example("hyperpod-eks-g6e-spot"), PLACE)))
    bare = example("rehearsal").model_copy(
        update={"budget": None, "alarms": example("rehearsal").alarms.model_copy(update={"emails": ()})}
    )
    assert first_steps(Plan(bare, PLACE)) == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"version": 2}, "cluster.version = 2: not known here; allowed: 1"),
        ([], "cluster is not a table of keys"),
        ({"version": 1, "nme": "x"}, "unknown key"),
    ],
)
def test_a_cluster_that_nobody_can_read_is_told_in_a_line(value: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(value)
    assert any(said in line for line in caught.value.problems)
