"""What a deployed cluster tells the rest of the house, and what it tells a person at its beginning and its end."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

from infra.config import ClusterSpec
from infra.config import parse as parse_spec
from infra.local.engine import PROGRAM
from infra.plan.nodes.bundle import DOCUMENT, bundle
from infra.plan.outputs import DeployedIds, cluster
from infra.plan.place import Place, bucket_names
from infra.plan.stack import Plan
from infra.plan.storage.home import OPTIONS
from infra.plan.storage.repository import url
from infra.plan.teardown import empty, first_steps, teardown, unprotect
from infra.preflight.offline import run_in
from infra.preflight.rule import Context
from lustrain.cluster import Capacity, Cluster, Kubernetes, Slurm, Taint, node_document, parse, to_json
from lustrain.problem import UserError
from tests.infra.edits import GONE, spec_of
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
    told = cluster(Plan(spec, PLACE), DeployedIds(lustre=LUSTRE, home=HOME, **NODES[spec.backend]))
    assert parse(json.loads(json.dumps(to_json(told)))) == told
    assert set(told.groups) == {group.name for group in spec.all_groups}
    assert (told.lustre is None) == (spec.storage.lustre is None)
    assert told.capacity.ends_at == spec.ends_at
    assert {name: group.capacity for name, group in told.groups.items()} == {
        group.name: Capacity(mode=group.capacity.mode, ends_at=group.capacity.ends_at) for group in spec.all_groups
    }


def test_launchers_hear_of_slurm_and_kubernetes_what_spec_knows() -> None:
    slurm, eks, ec2 = map(through_pulumi, ("hyperpod-slurm-p5", "hyperpod-eks-g6e-spot", "ec2-spot-g6e"))
    assert (slurm.slurm, slurm.kubernetes) == (Slurm(controller_group="controller"), None)
    partitions = {name: group.partition for name, group in slurm.groups.items()}
    assert partitions == {"controller": None, "login": None, "train": "train"}
    assert eks.kubernetes == Kubernetes(context="arn:aws:eks:us-west-2:123456789012:cluster/llm")
    workers = eks.groups["spot"]
    assert workers.labels == {"lustrain.dev/role": "worker"}
    assert workers.taints == (Taint(key="lustrain.dev/spot", value="true"),)
    assert (ec2.slurm, ec2.kubernetes) == (None, None)
    assert (ec2.prometheus_port, eks.prometheus_port) == (28_400, None)
    reserved = through_pulumi("ec2-p6-b300-reservation").groups["train"]
    assert (reserved.gpus, reserved.efa, reserved.accelerator) == (8, 16, "NVIDIA B300")


def through_pulumi(stack: str, **edits: Any) -> Cluster:
    """The stack's cluster as `pulumi stack output` prints it: the engine knows no whole numbers, and none in `4800.0`."""
    spec = spec_of(stack, edits)
    told = to_json(cluster(Plan(spec, PLACE), DeployedIds(lustre=LUSTRE, home=HOME, **NODES[spec.backend])))

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
def test_node_gets_the_same_at_boot_and_from_the_clusters_holder(stack: str, tuning: dict[str, Any]) -> None:
    files = {file.path: file.content for file in bundle(spec_of(stack, {"tuning": tuning})).files}
    told = node_document(through_pulumi(stack, tuning=tuning))
    assert (json.dumps(told, sort_keys=True, indent=1) + "\n").encode() == files[DOCUMENT]


def test_node_document_says_what_a_node_needs_and_nothing_else() -> None:
    told = node_document(through_pulumi("ec2-spot-g6e", tuning={"settings": {"clock.chrony": False}}))
    folders = {one["path"]: one["options"] for one in told["lustre"].pop("stripes")}
    assert folders["/fsx/containers"] == ["-c", "-1", "-S", "16M"]
    train = {"type": "g6e.48xlarge", "role": "worker", "gpus": 8, "efa": 4, "nvme": 4, "lustre_efa": 0}
    assert told == {
        "version": 1,
        "cluster": "spot-g6e",
        "backend": "ec2",
        "groups": {"train": train},
        "lustre": {"path": "/fsx", "efa": False, "throughput_mb_s": 1200.0},
        "mount": None,
        "home": {"path": "/home", "options": OPTIONS["openzfs"].split(",")},
        "tuning": {"profiles": {}, "settings": {"agent.metrics": "on", "clock.chrony": "off"}},
    }


def test_only_machines_that_exist_already_get_a_list_of_mounts() -> None:
    deployed = to_json(through_pulumi("ec2-spot-g6e"))
    assert node_document(parse(deployed))["mount"] is None
    machines = {**deployed, "backend": "machines", "nodes": {"addresses": ["10.0.0.1"]}}
    assert node_document(parse(machines))["mount"] == {"dns_name": "fs.example", "mount_name": "abcd1234"}
    assert node_document(parse({**machines, "lustre": None}))["mount"] is None


def test_node_of_eks_hears_nothing_of_file_systems_of_pods_alone() -> None:
    cluster = through_pulumi("hyperpod-eks-g6e-spot", **{"storage.lustre": {"capacity_tib": 1.2}})
    assert cluster.lustre is not None
    assert node_document(cluster)["lustre"] is None


def test_a_cluster_from_before_there_was_tuning_reads() -> None:
    watched = {"observability.prometheus": "none", "observability.grafana": "none"}
    now = to_json(through_pulumi("ec2-spot-g6e", **watched))
    before = {**now, "lustre": {**now["lustre"], "modules": {"ptlrpc": "a=1"}, "parameters": {"osc.*.a": "1"}}}
    assert before.pop("tuning") == {"profiles": {}, "settings": {}}
    assert parse(before) == parse(now)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("on", "on"), ("off", "off"), ("true", "on"), ("524288", "524288"), ("5.0", "5"), ("0.5", "0.5"), ("'08'", "08")],
)
def test_a_setting_is_what_the_user_wrote_however_yaml_takes_it(written: str, meant: str) -> None:
    value = yaml.safe_load(f"a: {written}")
    assert spec_of("rehearsal", {"tuning.settings": value}).tuning.settings == {"a": meant}


def test_nodes_are_listed_by_addresses_or_a_label_of_the_cluster() -> None:
    now = to_json(through_pulumi("rehearsal"))
    for nodes in ({"addresses": ["10.0.0.1"]}, {"hyperpod_cluster": "llm", "kubernetes_label": "a=b"}):
        assert parse({**now, "nodes": nodes})


@pytest.mark.parametrize(
    ("table", "change", "said"),
    [
        ("nodes", {"auto_scaling_groups": []}, "cluster.nodes"),
        ("nodes", {"hyperpod_cluster": "llm"}, "cluster.nodes"),
        ("nodes", {"kubernetes_label": "a=b"}, "cluster.nodes"),
        ("lustre", {"path": "/fs x\n[Mount]"}, "cluster.lustre.path = "),
        ("lustre", {"path": "/fsx\n"}, "cluster.lustre.path = "),
        ("lustre", {"path": "fsx"}, "cluster.lustre.path = "),
        ("lustre", {"path": "/"}, "cluster.lustre.path = "),
        ("lustre", {"path": "/fsx/../etc"}, "cluster.lustre.path = "),
        ("lustre", {"path": "/-fsx"}, "cluster.lustre.path = "),
        ("lustre", {"path": "/fsx%i"}, "cluster.lustre.path = "),
        ("lustre", {"dns_name": "fs.example\nOptions=suid"}, "cluster.lustre.dns_name = "),
        ("lustre", {"mount_name": "ab cd"}, "cluster.lustre.mount_name = "),
        ("lustre", {"strips": []}, "cluster.lustre.strips"),
    ],
)
def test_cluster_with_doubled_nodes_or_odd_mounts_is_one_line(table: str, change: dict[str, Any], said: str) -> None:
    now = to_json(through_pulumi("ec2-spot-g6e"))
    with pytest.raises(UserError) as caught:
        parse({**now, table: {**now[table], **change}})
    (line,) = caught.value.problems
    assert line.startswith(said)


def test_what_the_spec_lets_be_mounted_the_cluster_does_too() -> None:
    for path in ("/fsx", "/shared/data-1", "/a.b_c"):
        assert through_pulumi("ec2-spot-g6e", **{"storage.lustre.mount_path": path}).lustre.path == path
    for path in ("/.fsx", "/-x", "/fsx/...", "/"):
        with pytest.raises(UserError, match="plain absolute path"):
            spec_of("ec2-spot-g6e", {"storage.lustre.mount_path": path})


@pytest.mark.parametrize("key", ["storage.lustre.mount_path", "storage.home.mount_path"])
@pytest.mark.parametrize("path", ["/fsx/../etc", "/./fsx", "/.."])
def test_mount_path_that_leads_elsewhere_is_error_of_preflight(key: str, path: str) -> None:
    spec = spec_of("ec2-spot-g6e", {key: path})
    found = run_in(Context.of_region(spec, "us-east-1", datetime.now(UTC)))
    assert [one for one in found if one.level == "error" and one.path == key]


def test_workers_that_are_paid_for_in_two_ways_are_mixed() -> None:
    more = {"name": "more", "instance_type": "g6e.48xlarge", "count": 2}
    assert through_pulumi("ec2-spot-g6e", **{"groups.1": more}).capacity.mode == "mixed"
    assert through_pulumi("ec2-spot-g6e").capacity.mode == "spot"


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_teardown_names_everything_that_stays(stack: str) -> None:
    spec = example(stack)
    text = "\n".join(teardown(Plan(spec, PLACE)))
    names = bucket_names(spec, PLACE)
    assert all(f"Bucket('{name}')" in text for name in (names.data, names.checkpoints, names.lifecycle))
    assert ("FSx for Lustre" in text) is bool(spec.storage.lustre)
    homes = spec.storage.home and spec.storage.home.type
    assert ("FSx for OpenZFS" in text, "aws efs delete-file-system" in text) == (homes == "openzfs", homes == "efs")
    assert ("pulumi stack output reservations" in text) is any(group.capacity.create for group in spec.groups)


@pytest.mark.slow
@mock_aws
def test_the_command_for_a_bucket_removes_one_with_old_versions() -> None:
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
    kept = spec_of("rehearsal", {"buckets.data": "my-precious"})
    assert "my-precious" not in "\n".join(teardown(Plan(kept, PLACE)))


def test_first_steps_are_only_those_that_the_spec_asks_for() -> None:
    assert not any("helm" in line for line in first_steps(Plan(example("ec2-spot-g6e"), PLACE)))
    assert any("helm upgrade" in line for line in first_steps(Plan(example("hyperpod-eks-g6e-spot"), PLACE)))
    bare = spec_of("rehearsal", {"budget": GONE, "alarms.emails": []})
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


DESTROY = "pulumi destroy --exclude-protected"


def position(lines: tuple[str, ...], text: str) -> int:
    """Where the one line with `text` stands; -1 without one."""
    found = [number for number, line in enumerate(lines) if text in line]
    assert len(found) <= 1
    return found[0] if found else -1


def with_export() -> ClusterSpec:
    link = {"path": "/out", "bucket": "checkpoints", "prefix": "out", "export_events": ["NEW", "CHANGED"]}
    return spec_of("ec2-spot-g6e", {"storage.lustre.associations": [link]})


@pytest.mark.parametrize("stack", EXAMPLES)
def test_jobs_stop_before_anything_is_taken_down(stack: str) -> None:
    lines = teardown(Plan(example(stack), PLACE))
    assert 0 == position(lines, "Stop the jobs") < position(lines, DESTROY)


def test_exports_are_waited_for_before_the_destroy() -> None:
    lines = teardown(Plan(with_export(), PLACE))
    assert 0 < position(lines, "AgeOfOldestQueuedMessage") < position(lines, DESTROY)
    imports = spec_of("ec2-spot-g6e", {"storage.lustre.associations.0.export_events": []})
    assert position(teardown(Plan(imports, PLACE)), "AgeOfOldestQueuedMessage") == -1


def test_what_a_teardown_would_lose_for_good_is_said_before_it() -> None:
    lines = teardown(Plan(with_export(), PLACE))
    assert 0 < position(lines, "what lies outside /out on Lustre is in no bucket") < position(lines, DESTROY)
    imports = spec_of("ec2-spot-g6e", {"storage.lustre.associations.0.export_events": [], "storage.home": {}})
    lines = teardown(Plan(imports, PLACE))
    assert 0 < position(lines, "what lies on Lustre is in no bucket") < position(lines, DESTROY)
    assert "SkipFinalBackup=false" in lines[position(lines, "FSx for OpenZFS")]
    last = max(number for number, line in enumerate(lines) if "boto3" in line or " delete-" in line)
    assert last == position(lines, "  ALL CHECKPOINTS, bucket")


def test_cluster_on_a_training_plan_is_let_go_before_destroy() -> None:
    spec = example("hyperpod-slurm-p5")
    lines = teardown(Plan(spec, PLACE))
    assert 0 < position(lines, "pulumi state unprotect --yes") < position(lines, DESTROY)
    assert position(teardown(Plan(example("hyperpod-eks-g6e-spot"), PLACE)), "unprotect --yes") == -1
    project = yaml.safe_load((PROGRAM / "Pulumi.yaml").read_text(encoding="utf-8"))["name"]
    assert f"::{project}::lustrain:infra:HyperPod" in unprotect(spec)


@pytest.mark.parametrize("stack", EXAMPLES)
def test_what_stayed_is_used_again_when_its_lines_are_pasted(stack: str) -> None:
    spec = example(stack)
    pasted = yaml.safe_load(
        "\n".join(line for line in teardown(Plan(spec, PLACE)) if line.startswith(("  buckets: ", "  repo")))
    )
    again: dict[str, Any] = {**spec.model_dump(mode="json")}
    for key, values in pasted.items():
        again[key] = {**again[key], **values}
    kept = parse_spec(again)
    assert bucket_names(kept, PLACE) == bucket_names(spec, PLACE)
    assert kept.repository.existing == url(spec, PLACE)
    assert not any(line.startswith(("  buckets: ", "  repository: ")) for line in teardown(Plan(kept, PLACE)))


@pytest.mark.parametrize("stack", EXAMPLES)
def test_the_budget_is_said_not_to_see_what_was_bought_by_hand(stack: str) -> None:
    spec = example(stack)
    by_hand = any(group.capacity.reservation or group.capacity.training_plan for group in spec.groups)
    assert any("does not see" in line for line in first_steps(Plan(spec, PLACE))) is by_hand
