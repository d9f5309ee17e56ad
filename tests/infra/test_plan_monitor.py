"""The monitor by `pulumi up`: who reaches it and what it may, what outlives it, how it boots, and its
workspace."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.local.mocks import Recorder
from infra.plan.roles import node_role
from infra.plan.stack import Plan
from infra.plan.watch import machine
from infra.plan.watch.machine import user_data
from infra.preflight import commands, stackfile
from infra.preflight.change import Effect
from infra.preflight.explain import explain
from infra.preflight.explain_monitor import ANEW
from lustrain import deployed
from tests.infra.edits import GONE, edited, place, spec_of
from tests.infra.mistakes import EKS, EXISTING, PROXY, SLURM, SPOT
from tests.infra.registered import Registered, built, waits_for

INSTANCE, VOLUME = "aws:ec2/instance:Instance", "aws:ebs/volume:Volume"
OBJECT, ADDON = "aws:s3/bucketObjectv2:BucketObjectv2", "aws:eks/addon:Addon"
INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
URL = "https://aps-workspaces.us-west-2.amazonaws.com/workspaces/ws-mock/"


@pytest.fixture(scope="module")
def made() -> tuple[Registered, dict[str, Any]]:
    return built(SPOT, {}, Recorder("us-east-1"))


def test_machine_is_made_anew_and_its_data_stays(made: tuple[Registered, dict[str, Any]]) -> None:
    resources, outputs = made
    instance, volume = resources.only(INSTANCE), resources.only(VOLUME)
    assert (instance.deleteBeforeReplace, list(instance.ignoreChanges), instance.protect) == (True, ["ami"], False)
    assert (volume.protect, volume.retainOnDelete) == (True, True)
    assert {"spot-g6e-monitor", "spot-g6e-private-default"} <= waits_for(instance)
    (sent,), (disk,) = (resources.of(kind).values() for kind in (INSTANCE, VOLUME))
    assert (disk["encrypted"], disk["size"]) == (True, 50)
    assert sent["metadataOptions"]["httpTokens"] == "required"
    assert sent["vpcSecurityGroupIds"] == ["spot-g6e-monitor-id"]
    script = base64.b64decode(sent["userDataBase64"]).decode()
    assert f"volume_id={outputs['monitorData']}\n" in script
    assert set(outputs["open"]) == {"grafana", "prometheus"}
    assert all(outputs["monitor"] in command for command in outputs["open"].values())


def test_monitor_reaches_metrics_and_nothing_reaches_it(made: tuple[Registered, dict[str, Any]]) -> None:
    rules = made[0].of(INGRESS).values()
    assert not [rule for rule in rules if rule["securityGroupId"] == "spot-g6e-monitor-id"]
    from_monitor = [rule for rule in rules if rule.get("referencedSecurityGroupId") == "spot-g6e-monitor-id"]
    ports = sorted((rule["fromPort"], rule["toPort"], rule["securityGroupId"]) for rule in from_monitor)
    nodes = "spot-g6e-cluster-id"
    assert ports == [(9100, 9100, nodes), (9400, 9400, nodes), (28400, 28407, nodes)]


def test_monitor_alone_writes_to_the_workspace() -> None:
    plan = Plan(spec_of(SLURM, {}), place(SLURM))
    found = {role.key: role for role in plan.roles}
    assert set(found) == {"node", "monitor"}
    assert (found["monitor"].trust["Statement"][0]["Principal"], found["monitor"].instance_profile) == (
        {"Service": "ec2.amazonaws.com"},
        True,
    )
    assert found["monitor"].policy
    rights = {action: one for one in found["monitor"].policy["Statement"] for action in one["Action"]}
    ours = {"StringEquals": {"aws:ResourceTag/lustrain:cluster": "llm-p5"}}
    assert (rights["aps:RemoteWrite"]["Resource"], rights["aps:RemoteWrite"]["Condition"]) == (
        ["arn:aws:aps:us-west-2:123456789012:workspace/*"],
        ours,
    )
    assert "aps:" not in json.dumps(node_role(plan.spec, plan.place).policy)


def test_workspace_has_rules_a_topic_and_its_name_in_the_files() -> None:
    resources, outputs = built(SLURM, {}, Recorder("us-west-2"))
    (rules,) = resources.of("aws:amp/ruleGroupNamespace:RuleGroupNamespace").values()
    (manager,) = resources.of("aws:amp/alertManagerDefinition:AlertManagerDefinition").values()
    assert rules["workspaceId"] == manager["workspaceId"] == "llm-p5-metrics-id"
    topic = "arn:aws:sns:us-west-2:123456789012:llm-p5-alarms"
    assert "alert: " in rules["data"]
    assert topic in manager["definition"]
    workspace = resources.only("aws:amp/workspace:Workspace")
    assert (workspace.protect, workspace.retainOnDelete) == (True, True)
    earlier = "urn:pulumi:test::lustrain::lustrain:infra:Observability::llm-p5"
    assert [alias.spec.parentUrn for alias in workspace.aliases] == [earlier]
    config = next(one for one in resources.of(OBJECT).values() if one["key"].endswith("/prometheus.yml"))
    assert f"{URL}api/v1/remote_write" in config["content"]
    assert not [one for one in resources.of(OBJECT).values() if "{workspace}" in one.get("content", "")]
    (mails,) = resources.of("aws:sns/topic:Topic").values()
    senders = [one["Principal"] for one in json.loads(mails["policy"])["Statement"]]
    assert {"Service": "aps.amazonaws.com"} in senders
    assert (outputs["prometheus"], "open" in outputs) == (URL, False)


def test_on_eks_the_add_on_writes_to_the_workspace() -> None:
    resources, _ = built(EKS, {"observability": {"prometheus": "amp"}}, Recorder("us-east-1"))
    assert not resources.of(INSTANCE)
    assert not resources.of("aws:amp/ruleGroupNamespace:RuleGroupNamespace")
    addons = {one["addonName"]: one for one in resources.of(ADDON).values()}
    values = json.loads(addons["amazon-sagemaker-hyperpod-observability"]["configurationValues"])
    assert values["ampWorkspace"]["prometheusEndpoint"] == URL.replace("us-west-2", "us-east-1")
    (pods,) = (
        one
        for one in resources.of("aws:eks/podIdentityAssociation:PodIdentityAssociation").values()
        if one["namespace"] == "hyperpod-observability"
    )
    assert "hyperpod-metrics" in pods["roleArn"]


def test_a_closed_network_lets_the_monitor_to_aws_only() -> None:
    plan = Plan(spec_of(SPOT, {"network": {"closed": True}}), place(SPOT))
    assert [rule.peer.value for rule in plan.security if rule.group == "monitor"] == ["10.0.0.0/16", "s3"]
    doors = [rule.peer.value for rule in plan.security if (rule.group, rule.direction) == ("endpoints", "ingress")]
    assert doors == ["cluster", "monitor"]
    assert "sns" in {endpoint.key for endpoint in plan.network.endpoints}


@pytest.mark.parametrize(
    ("edits", "path", "effect"),
    [
        ({"observability.monitor": {"type": "m7i.xlarge"}}, "observability.monitor.type", Effect.IN_PLACE),
        ({"observability.monitor": {"type": "m7g.large"}}, "observability.monitor.type", Effect.IMPOSSIBLE),
        ({"observability.monitor": {"disk_gib": 20}}, "observability.monitor.disk_gib", Effect.IMPOSSIBLE),
        ({"observability.monitor": {"disk_gib": 90}}, "observability.monitor.disk_gib", Effect.IN_PLACE),
        ({"observability.monitor": {"retention_days": 90}}, "observability", Effect.IN_PLACE),
        ({"observability.grafana": GONE}, "observability", Effect.IN_PLACE),
        ({"observability.prometheus": "amp"}, "observability", Effect.IN_PLACE),
        ({"observability": GONE}, "observability.prometheus", Effect.IMPOSSIBLE),
        ({"zone_id": "use1-az6"}, "zone_id", Effect.IMPOSSIBLE),
    ],
)
def test_update_of_the_monitor_is_explained(edits: dict[str, Any], path: str, effect: Effect) -> None:
    changes = explain(spec_of(SPOT, {}), spec_of(SPOT, edits))
    assert (path, effect) in [(change.path, change.effect) for change in changes]


def test_newer_lustrain_that_boots_the_monitor_otherwise_is_named(
    made: tuple[Registered, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Said once, also where an edit makes it anew too; also of a stack that is older than the output."""
    outputs = {name: made[1][name] for name in ("spec", "bundle", "monitorBoot")}
    monkeypatch.setattr(deployed, "outputs", lambda *_: outputs)
    assert commands.changes(SPOT, None) == []
    body, newer = machine.BODY, tmp_path / "monitor_boot.sh"
    newer.write_text(body.read_text() + "true\n")
    monkeypatch.setattr(machine, "BODY", newer)
    (change,) = commands.changes(SPOT, None)
    assert (change.path, change.effect, change.message.endswith(ANEW.message)) == (
        "observability",
        Effect.IN_PLACE,
        True,
    )
    edit = {"observability": outputs["spec"]["observability"] | {"monitor": {"retention_days": 90}}}
    outputs["spec"] = outputs["spec"] | edit
    assert [change.path for change in commands.changes(SPOT, None)] == ["observability"]
    monkeypatch.setattr(machine, "BODY", body)
    outputs["spec"] = made[1]["spec"]
    assert commands.changes(SPOT, None) == []
    del outputs["monitorBoot"]
    assert commands.changes(SPOT, None) == [change]


def test_workspace_ends_by_hand_only() -> None:
    changes = explain(spec_of(SLURM, {}), spec_of(SLURM, {"observability.prometheus": "self"}))
    assert (Effect.IMPOSSIBLE, "observability.prometheus") in [(change.effect, change.path) for change in changes]


@pytest.mark.parametrize(
    ("switch", "word", "effects"),
    [
        (True, "amp", [Effect.IN_PLACE, Effect.IN_PLACE]),
        (True, "self", [Effect.IN_PLACE, Effect.DELETES_OBJECTS]),
        (True, "none", [Effect.DELETES_OBJECTS]),
        (False, "amp", [Effect.IN_PLACE]),
        (False, "none", []),
    ],
)
def test_update_of_a_stack_with_the_former_switch_is_explained(
    monkeypatch: pytest.MonkeyPatch, switch: bool, word: str, effects: list[Effect]
) -> None:
    told = edited(SLURM, {"observability": {"log_days": 30, "dashboard": True, "prometheus": switch}})
    after = stackfile.Stack(SLURM, "us-west-2", spec_of(SLURM, {"observability.prometheus": word}))
    monkeypatch.setattr(deployed, "outputs", lambda *_: {"spec": told})
    monkeypatch.setattr(stackfile, "read", lambda _: after)
    changes = [change for change in commands.changes(SLURM, None) if change.path == "observability.prometheus"]
    assert [change.effect for change in changes] == effects


def boot(folder: Path, *, cli: str = "exit 0", edits: dict[str, Any] | None = None) -> tuple[int, Path, list[str]]:
    """Run the first boot in a folder that stands for the machine; its exit status, the folder, and the commands that it ran."""
    root, programs, called = folder / "root", folder / "bin", folder / "called"
    programs.mkdir()
    texts = dict.fromkeys(("aws", "systemctl", "snap"), 'echo "$(basename "$0") $*" >>"$CALLED"')
    texts["aws"] += f"\n{cli}"
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    spec = spec_of(SPOT, edits or {})
    script = user_data(spec, place(SPOT), bundle_uri="s3://b/lifecycle/1", volume_id="vol-1")
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LUSTRAIN_ROOT": str(root),
        "LUSTRAIN_PAUSE_SECONDS": "0",
        "CALLED": str(called),
    }
    (folder / "user-data").write_text(script)
    done = subprocess.run(["bash", str(folder / "user-data")], env=environment, check=False)
    return done.returncode, root, called.read_text().splitlines()


def test_first_boot_fetches_the_bundle_and_starts_its_unit(tmp_path: Path) -> None:
    status, root, called = boot(tmp_path, edits={"network.existing": EXISTING, "network.proxy": PROXY})
    assert status == 0
    assert called[0] == f"aws s3 cp --recursive --only-show-errors s3://b/lifecycle/1 {root}/opt/lustrain/monitor"
    assert called[-1] == "systemctl start --no-block lustrain-monitor.service"
    told = dict(line.split("=", 1) for line in (root / "etc/lustrain/monitor.env").read_text().splitlines())
    assert (told["LUSTRAIN_CLUSTER"], told["MONITOR_VOLUME"]) == ("spot-g6e", "vol-1")
    assert told["https_proxy"] == "http://proxy.example.com:3128"
    unit = (root / "etc/systemd/system/lustrain-monitor.service").read_text()
    assert "ExecStart=/bin/bash /opt/lustrain/monitor/monitor.sh\n" in unit


def test_first_boot_without_its_bundle_is_counted(tmp_path: Path) -> None:
    status, root, called = boot(tmp_path, cli='[[ "$1" != s3 ]]')
    assert status != 0
    assert called[-1].startswith("aws cloudwatch put-metric-data")
    assert (root / "var/lib/lustrain/boot").read_text() == "failed lifecycle bundle\n"
    assert not (root / "etc/systemd/system/lustrain-monitor.service").exists()
