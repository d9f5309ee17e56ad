"""A Slurm of the stack's own on EC2: what its nodes are told, who may touch its key, and what outlives its controller."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from infra.local.mocks import Recorder
from infra.plan.deployer_policy import deployer_policy
from infra.plan.nodes.auto_scaling import IMAGES_WITH_SLURM
from infra.plan.nodes.user_data import SlurmIds, facts
from infra.plan.roles import roles
from infra.plan.stack import Plan
from infra.preflight import commands, explain_scheduler, stackfile
from infra.preflight.change import Effect, protected
from infra.preflight.explain import explain, explain_bundle
from infra.preflight.offline import run_offline
from lustrain.cluster import parse
from lustrain.problem import UserError
from tests.infra.edits import GONE, place, spec_of
from tests.infra.mistakes import DATABASE, NODE_ROLE, PROFILE, RECORDS, SLURM, SPOT
from tests.infra.registered import Registered, built, waits_for

STACK = "ec2-slurm-g6e"
IDS = SlurmIds("10.0.64.10", "arn:aws:secretsmanager:us-east-1:123456789012:secret:s", "vol-0123456789abcdef0")
INSTANCE, VOLUME = "aws:ec2/instance:Instance", "aws:ebs/volume:Volume"
INTERFACE, SECRET = "aws:ec2/networkInterface:NetworkInterface", "aws:secretsmanager/secret:Secret"


@pytest.fixture(scope="module")
def made() -> tuple[Registered, dict[str, Any]]:
    edits = {"scheduler.settings": {"SlurmdTimeout": "120"}, "scheduler.account": "nlp", "groups.0.partition": "gpu"}
    return built(STACK, edits, Recorder("us-east-1"))


def secrets(statements: list[dict[str, Any]]) -> set[str]:
    return {action for one in statements for action in one["Action"] if action.startswith("secretsmanager:")}


def test_nodes_hear_their_duty_and_only_controller_its_volume() -> None:
    spec = spec_of(STACK, {})
    assert spec.controller
    told = {
        group.name: facts(spec, place(STACK), group, lustre=False, home=False, slurm=IDS)["slurm"]
        for group in (spec.controller, *spec.workers)
    }
    shared = {"host": "slurm-g6e-controller", "address": IDS.address, "munge_secret": IDS.munge_secret}
    assert told["controller"] == {"duty": "controller", **shared, "state_volume": IDS.state_volume}
    assert told["train"] == {"duty": "compute", **shared, "state_volume": None}


def test_nodes_only_read_the_munge_key_and_the_deployer_never() -> None:
    spec = spec_of(STACK, {})
    found = {role.key: role for role in roles(spec, place(STACK))}
    read, write = "secretsmanager:GetSecretValue", "secretsmanager:PutSecretValue"
    assert {key: secrets(role.policy["Statement"]) for key, role in found.items() if role.policy} == {
        "node": {read},
        "controller": {read, write},
        "login": {read},
    }
    assert not {read, write} & secrets(deployer_policy(spec, place(STACK))["Statement"])
    own = spec_of(STACK, {"access": {"node_role": NODE_ROLE, "instance_profile": PROFILE}})
    (only,) = roles(own, place(STACK))
    assert only.policy
    assert secrets(only.policy["Statement"]) == {read, write}


def test_address_state_and_key_are_no_part_of_the_instance(made: tuple[Registered, dict[str, Any]]) -> None:
    resources, outputs = made
    instance, volume = resources.only(INSTANCE), resources.only(VOLUME)
    assert (instance.deleteBeforeReplace, list(instance.ignoreChanges), instance.protect) == (True, ["ami"], False)
    assert (volume.protect, volume.retainOnDelete) == (True, True)
    (sent,), (secret,), (disk,) = (resources.of(kind).values() for kind in (INSTANCE, SECRET, VOLUME))
    assert sent["networkInterfaces"] == [{"deviceIndex": 0, "networkInterfaceId": "slurm-g6e-controller-address-id"}]
    assert sent["userDataReplaceOnChange"] is True
    assert (disk["encrypted"], disk["size"]) == (True, 20)
    assert not any(kind.startswith("aws:secretsmanager/secretVersion") for kind in resources.kinds)
    assert "secretString" not in secret
    script = base64.b64decode(sent["userDataBase64"]).decode()
    assert [text for text in ('"duty": "controller"', "slurm-g6e-controller-state-id") if text not in script] == []
    assert outputs["controller"] == "i-0123456789abcdef0"
    assert outputs["slurmState"] == "slurm-g6e-controller-state-id"


def test_the_controller_waits_for_its_first_minute(made: tuple[Registered, dict[str, Any]]) -> None:
    waited = waits_for(made[0].only(INSTANCE))
    assert {"slurm-g6e-controller", "slurm-g6e-system", "slurm-g6e-private-default"} <= waited


def test_the_cluster_names_controller_instance_and_partitions(made: tuple[Registered, dict[str, Any]]) -> None:
    cluster = parse(made[1]["cluster"])
    assert cluster.slurm
    assert (cluster.slurm.controller, cluster.slurm.account) == ("10.0.64.10", "nlp")
    assert cluster.slurm.settings == {"SlurmdTimeout": "120"}
    assert cluster.nodes.instances == ("i-0123456789abcdef0",)
    assert {name: (group.role, group.partition) for name, group in cluster.groups.items()} == {
        "train": ("worker", "gpu"),
        "login": ("login", None),
        "controller": ("controller", None),
    }


def test_default_images_have_a_slurm_with_dynamic_nodes() -> None:
    for edits, arch in (({}, "amd64"), ({"scheduler.controller.type": "m7g.large"}, "arm64")):
        plan = Plan(spec_of(STACK, edits), place(STACK))
        assert plan.controller
        assert plan.controller.image.parameter == IMAGES_WITH_SLURM["ubuntu"].parameter.format(arch=arch)
        assert [group.image.family for group in plan.node_groups] == ["nvidia-24-04-x86-64", "ubuntu-24-04-x86-64"]
    assert Plan(spec_of(SPOT, {}), place(SPOT)).node_groups[0].image.family == "nvidia-x86-64"


def test_scheduler_elsewhere_is_an_error_and_makes_no_controller() -> None:
    spec = spec_of(SLURM, {"scheduler": {"type": "slurm"}})
    assert [one.path for one in run_offline(spec, place(SLURM)) if one.code == "SLM-001"] == ["scheduler"]
    plan = Plan(spec, place(SLURM))
    assert (plan.controller, [role.key for role in plan.roles]) == (None, ["node", "monitor"])
    assert "slurm.json" not in {file.path for file in plan.bundle.files}


def test_a_closed_network_of_yours_needs_the_way_to_the_key() -> None:
    existing = {"vpc_id": "vpc-0123456789abcdef0", "compute_subnet_id": "subnet-0123456789abcdef0"}
    found = run_offline(spec_of(STACK, {"network": {"closed": True, "existing": existing}}), place(STACK))
    assert ["secretsmanager" in one.why for one in found if one.code == "NET-010"] == [True]


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"scheduler.type": "pbs"}, "scheduler.type"),
        ({"scheduler.controller.state_gib": 0}, "scheduler.controller.state_gib"),
        ({"scheduler.settings": {"SlurmctldHost": "me"}}, "scheduler.settings"),
        ({"scheduler.idle_minutes": 1}, "scheduler.idle_minutes"),
        ({"scheduler.accounting": {"keep_months": 0}}, "scheduler.accounting.keep_months"),
        ({"scheduler.accounting": {"database": DATABASE}}, "scheduler.accounting.database.security_group_id"),
        ({"scheduler.accounting": {"database": {**RECORDS, "endpoint": "db\nStorageUser=x"}}}, "endpoint"),
    ],
)
def test_a_scheduler_of_no_known_form_is_one_line(edits: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(STACK, edits)
    (line,) = caught.value.problems
    assert said in line


CHANGES: list[tuple[str, Any, Effect]] = [
    ("scheduler", GONE, Effect.IMPOSSIBLE),
    ("scheduler.controller.type", "m7i.xlarge", Effect.REPLACES_NODES),
    ("scheduler.controller.type", "m7g.large", Effect.IMPOSSIBLE),
    ("scheduler.controller.state_gib", 40, Effect.IN_PLACE),
    ("scheduler.controller.state_gib", 10, Effect.IMPOSSIBLE),
    ("scheduler.settings", {"SlurmdTimeout": "120"}, Effect.NEW_NODES),
    ("scheduler.qos", "high", Effect.IN_PLACE),
    ("scheduler.accounting", {}, Effect.NEW_NODES),
]


@pytest.mark.parametrize(("key", "value", "effect"), CHANGES)
def test_changes_of_a_scheduler_are_told(key: str, value: Any, effect: Effect) -> None:
    (change,) = explain(spec_of(STACK, {}), spec_of(STACK, {key: value}))
    assert (change.path, change.effect) == (key, effect)


@pytest.mark.parametrize(
    ("before", "after", "path", "effect"),
    [
        ({}, GONE, "scheduler.accounting", Effect.NEW_NODES),
        ({}, {"database": RECORDS}, "scheduler.accounting.database", Effect.IN_PLACE),
        ({"keep_months": 24}, {}, "scheduler.accounting.keep_months", Effect.IN_PLACE),
        ({}, {"keep_months": 24}, "scheduler.accounting", Effect.IN_PLACE),
    ],
)
def test_changes_of_accounting_are_told(before: Any, after: Any, path: str, effect: Effect) -> None:
    old = spec_of(STACK, {"scheduler.accounting": before})
    new = spec_of(STACK, {} if after is GONE else {"scheduler.accounting": after})
    (change,) = explain(old, new)
    assert (change.path, change.effect) == (path, effect)
    assert bool(change.lost) == bool(change.instead)


def slurm_json(edits: dict[str, Any]) -> dict[str, Any]:
    files = {file.path: file.content for file in Plan(spec_of(STACK, edits), place(STACK)).bundle.files}
    return json.loads(files["slurm.json"])  # type: ignore[no-any-return]


def test_accounting_is_off_and_one_key_turns_it_on() -> None:
    off, on = slurm_json({}), slurm_json({"scheduler.accounting": {}})
    assert ("accounting" in off, "AccountingStorage" in off["files"]["slurm.conf"]) == (False, False)
    lines = set(on["files"]["slurm.conf"].splitlines())
    assert {
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageTRES=gres/gpu",
        "JobAcctGatherType=jobacct_gather/cgroup",
    } < lines
    assert (on["accounting"]["cluster"], on["accounting"]["secret"]) == ("slurm-g6e", None)
    conf = on["accounting"]["conf"].splitlines()
    assert {"StorageHost=localhost", "StorageUser=slurm", "PurgeJobAfter=12month", "PurgeStepAfter=12month"} < {*conf}


def test_only_controller_reads_the_login_of_the_database() -> None:
    edits = {"scheduler.accounting": {"database": {**RECORDS, "port": 3307}}}
    found = {role.key: role.policy for role in roles(spec_of(STACK, edits), place(STACK)) if role.policy}
    readers = {
        key: [one["Resource"] for one in policy["Statement"] if one["Sid"] == "AccountingSecret"]
        for key, policy in found.items()
    }
    assert readers == {"node": [], "login": [], "controller": [[RECORDS["secret_arn"]]]}
    (shared,) = roles(
        spec_of(STACK, {**edits, "access": {"node_role": NODE_ROLE, "instance_profile": PROFILE}}), place(STACK)
    )
    assert shared.policy
    assert "AccountingSecret" in {one["Sid"] for one in shared.policy["Statement"]}
    plan = slurm_json(edits)["accounting"]
    assert plan["secret"] == RECORDS["secret_arn"]
    words = dict(line.split("=", 1) for line in plan["conf"].splitlines() if "=" in line)
    assert (words["StorageHost"], words["StoragePort"], words["StorageLoc"]) == (
        "db.example.com",
        "3307",
        "slurm_slurm_g6e",
    )
    assert not {"StorageUser", "StoragePass"} & {*words}


def test_what_the_controller_boots_with_makes_it_anew() -> None:
    def effects(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Effect]:
        changes = explain(spec_of(STACK, before), spec_of(STACK, after))
        return {change.path: change.effect for change in changes if change.path.startswith("scheduler")}

    key, block = "scheduler.controller.image_id", {"groups.0.capacity.ends_at": "2027-01-01T00:00:00Z"}
    assert effects({}, {"access.ssh_key": "mine"}) == {"scheduler.controller": Effect.REPLACES_NODES}
    assert effects({"storage.home": GONE}, {}) == {"scheduler.controller": Effect.REPLACES_NODES}
    assert effects({}, {"groups.0.count": 8, **block}) == {}
    assert effects({key: "ami-0123456789abcdef0"}, {}) == {key: Effect.IMPOSSIBLE}, "Pulumi leaves the image as it is"


def test_another_zone_does_not_take_the_queue_along() -> None:
    moved = explain(spec_of(STACK, {}), spec_of(STACK, {"zone_id": "use1-az5"}))
    assert protected("zone_id", explain_scheduler.VOLUME) in moved


def test_added_scheduler_is_for_new_nodes_and_a_bundle_renews() -> None:
    (change,) = explain(spec_of(STACK, {"scheduler": GONE}), spec_of(STACK, {}))
    assert (change.path, change.effect) == ("scheduler", Effect.NEW_NODES)
    effects = [change.effect for change in explain_bundle("a", "b", controller=True)]
    assert effects == [Effect.REPLACES_NODES, Effect.NEW_NODES]


def test_slurm_json_is_a_part_of_bundle_that_counts_leave_alone() -> None:
    plans = [Plan(spec_of(STACK, {"groups.0.count": count}), place(STACK)).bundle for count in (4, 8)]
    (document,) = (file.content for file in plans[0].files if file.path == "slurm.json")
    assert json.loads(document)
    assert plans[0].sha == plans[1].sha, "a controller would be made anew for another count"


def test_a_controller_that_is_made_anew_is_told_once(tmp_path: Path) -> None:
    text = (stackfile.PROGRAM / "Pulumi.ec2-slurm-g6e.yaml").read_text(encoding="utf-8")
    old = tmp_path / "old.yaml"
    old.write_text(
        text.replace(
            "controller: { type: m7i.large", 'settings: {MinJobAge: "60"}\n      controller: { type: m7i.xlarge'
        )
    )
    told = commands.changes("ec2-slurm-g6e", str(old))
    assert [one.path for one in told if one.effect is Effect.REPLACES_NODES] == ["scheduler.controller.type"]
    assert "lifecycle" in {one.path for one in told}
