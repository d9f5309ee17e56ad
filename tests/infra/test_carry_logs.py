"""Logs of nodes and runs go to groups of the stack, by an agent that AWS signed, and a node boots without them too."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator

from infra.plan.nodes.bundle import LOGS, ON_INIT
from infra.plan.nodes.eks import LOGS_ROLE
from infra.plan.nodes.logs import (
    ADDON,
    ADDON_ACCOUNT,
    ADDON_NAMESPACE,
    JOB_LOGS,
    LAUNCH_LOGS,
    PORT,
    agent_configuration,
)
from infra.plan.place import Place
from infra.plan.stack import Plan
from infra.preflight.explain import explain
from launch import request
from launch.backends import slurm_executor, ssh_unit
from tests.infra.edits import STACKS, spec_of
from tests.infra.lifecycle_node import EC2, Node

NAME = {"type": "string", "minLength": 1, "maxLength": 512}
FILE = {
    "type": "object",
    "properties": {
        "file_path": {"type": "string", "maxLength": 4096},
        "log_group_name": NAME,
        "log_stream_name": NAME,
        "publish_multi_logs": {"type": "boolean"},
        "filters": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": ["include", "exclude"]}, "expression": {"type": "string"}},
                "additionalProperties": False,
            },
        },
    },
    "required": ["file_path"],
    "additionalProperties": False,
}
LOGS_SECTION = {
    "type": "object",
    "properties": {
        "logs_collected": {
            "properties": {
                "files": {
                    "properties": {
                        "collect_list": {"type": "array", "minItems": 1, "uniqueItems": True, "items": FILE}
                    },
                    "required": ["collect_list"],
                    "additionalProperties": False,
                }
            },
            "additionalProperties": False,
        },
        "metrics_collected": {"type": "object"},
    },
    "additionalProperties": False,
}
SCHEMA = {"type": "object", "properties": {"logs": LOGS_SECTION}, "additionalProperties": False}
"""What of the agent's schema is used here, which names further keys
(https://github.com/aws/amazon-cloudwatch-agent/blob/main/translator/config/schema.json)."""
CONTROL = "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"
CURL = """#!/bin/bash
while (($# > 2)); do shift; done
echo "$2" >>"$MOUNTS"
[[ "$2" != *-us-*/assets/* ]] && echo x >"$1"
"""
APT = """#!/bin/bash
echo "apt-get $*" >>"$MOUNTS"
mkdir -p "$LUSTRAIN_ROOT/opt/aws/amazon-cloudwatch-agent/bin"
printf '#!/bin/bash\\necho "$*" >>"$ASKED"\\n' >"$LUSTRAIN_ROOT/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"
chmod +x "$LUSTRAIN_ROOT/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"
"""
GPG = '#!/bin/bash\n[[ "$*" != *--verify* ]] || echo "[GNUPG:] VALIDSIG 1 2026-01-01 1 0 4 0 1 10 00 {signer}"\n'
SIGNER = "937616F3450B7D806CBD9725D58167303B789C72"


def plan(stack: str, **edits: Any) -> Plan:
    return Plan(spec_of(stack, edits), Place("us-east-2", "123456789012"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    for file in plan("hyperpod-slurm-p5", **{"storage.home": None}).bundle.files:
        if file.path.startswith(("logs.", "packages.")):
            (node.bundle / file.path).write_bytes(file.content)
    # As user data has it on EC2.
    script = node.bundle / LOGS.name
    script.write_text(script.read_text().replace("set -euo pipefail", "set -euo pipefail\nAWS_REGION=us-east-2"))
    node.command("curl", CURL)
    node.command("dpkg", "#!/bin/bash\necho arm64\n")
    node.command("apt-get", APT)
    node.command("gpg", GPG.format(signer=SIGNER))
    return node


@pytest.mark.parametrize("stack", STACKS)
def test_agents_carry_into_groups_that_the_stack_makes(stack: str) -> None:
    declared = plan(stack)
    groups = {group.name for group in declared.observability.log_groups}
    assert f"/lustrain/{declared.spec.name}/train" in groups
    if declared.spec.backend == "hyperpod-eks":
        assert LOGS.name not in {file.path for file in declared.bundle.files}
        return
    files = {file.path: file.content for file in declared.bundle.files}
    configuration = json.loads(files["logs.json"])
    Draft4Validator(SCHEMA).validate(configuration)
    carried = configuration["logs"]["logs_collected"]["files"]["collect_list"]
    assert {entry["log_group_name"] for entry in carried} == groups
    assert ("slurmctld" in str(carried)) is (declared.spec.scheduler is not None or declared.spec.hyperpod)
    assert ("provisioning.log" in str(carried)) is False, "HyperPod carries it itself"
    assert configuration["logs"]["metrics_collected"] == {"emf": {}}
    rights = [one for role in declared.roles for one in (role.policy or {"Statement": []})["Statement"]]
    allowed = {arn for one in rights if one["Sid"] == "Logs" for arn in one["Resource"]}
    arn = f"arn:aws:logs:us-east-2:123456789012:log-group:/lustrain/{declared.spec.name}"
    assert allowed == {f"{arn}/{name}{end}" for name in ("train", "node") for end in ("", ":*")}


def test_launchers_write_where_agents_look() -> None:
    assert JOB_LOGS == slurm_executor.JOB_LOGS
    assert JOB_LOGS in LOGS.read_text(encoding="ascii")
    run = "s3://b/runs/first"
    for path in (ssh_unit.log_file(ssh_unit.unit_name(run, 3)), ssh_unit.supervisor_log(run)):
        assert fnmatch(path, LAUNCH_LOGS)
    assert {address.rpartition(":")[2] for address in (request.NODE_AGENT, request.EKS_AGENT)} == {str(PORT)}
    assert request.EKS_AGENT.startswith(f"{ADDON_ACCOUNT}.{ADDON_NAMESPACE}:")


def test_pods_carry_logs_with_a_role_of_their_own() -> None:
    declared = plan("hyperpod-eks-g6e-spot")
    assert declared.eks is not None
    addon = next(one for one in declared.eks.addons if one.name == ADDON)
    assert not addon.before_nodes
    assert addon.values is not None
    billed = ("containerInsights", "otelContainerInsights", "applicationSignals")
    assert [addon.values[part] for part in billed] == [{"enabled": False}] * 3
    identity = next(one for one in declared.eks.pod_identities if one.role == LOGS_ROLE)
    assert (identity.namespace, identity.service_account) == (ADDON_NAMESPACE, ADDON_ACCOUNT)
    (role,) = (one for one in declared.roles if one.key == LOGS_ROLE)
    assert role.policy is not None
    (statement,) = role.policy["Statement"]
    assert "logs:CreateLogGroup" not in statement["Action"], "without it no group comes back after its stack"
    names = {group.name for group in declared.observability.log_groups}
    assert {arn.split(":log-group:")[1].removesuffix(":*") for arn in statement["Resource"]} == names


@pytest.mark.parametrize("stack", ["ec2-slurm-g6e", "hyperpod-slurm-p5", "hyperpod-eks-g6e-spot"])
def test_without_logs_nothing_is_made_for_them(stack: str) -> None:
    silent = plan(stack, **{"observability.logs": False})
    assert silent.observability.log_groups == ()
    assert not [alarm for alarm in silent.observability.alarms if alarm.name.endswith("-run-stalled")]
    assert not [file.path for file in silent.bundle.files if file.path.startswith("logs.")]
    assert LOGS_ROLE not in {role.key for role in silent.roles}
    assert "logs:PutLogEvents" not in json.dumps([role.policy for role in silent.roles])
    changes = {one.path: bool(one.lost) for one in explain(spec_of(stack, {}), silent.spec)}
    assert changes == {"observability.logs": True}


def test_existing_eks_cluster_keeps_the_agent_it_has() -> None:
    existing = {"vpc_id": "vpc-0123456789abcdef0", "compute_subnet_id": "subnet-0123456789abcdef0"}
    for addons, groups in ((), 0), ((ADDON,), 4):
        edits = {"network": {"existing": existing}, "eks.existing": {"name": "theirs", "addons": list(addons)}}
        declared = plan("hyperpod-eks-g6e-spot", **edits)
        assert len(declared.observability.log_groups) == groups


def test_signed_agent_is_installed_and_carries_logs(node: Node) -> None:
    assert node.boot(ON_INIT).returncode == 0
    region = "https://amazoncloudwatch-agent-us-east-2.s3.us-east-2.amazonaws.com"
    package = f"{region}/ubuntu/arm64/1.300072.0b1766/amazon-cloudwatch-agent.deb"
    key = "assets/amazon-cloudwatch-agent.gpg"
    downloads = node.mounts.read_text().splitlines()
    assert downloads[:4] == [
        package,
        f"{region}/{key}",
        f"https://amazoncloudwatch-agent.s3.amazonaws.com/{key}",
        f"{package}.sig",
    ]
    told = f"-a append-config -m ec2 -s -c file:{node.bundle}/logs.json"
    assert node.asked.read_text().splitlines() == [told]
    node.known = "is-active --quiet amazon-cloudwatch-agent"
    assert node.boot(ON_INIT).returncode == 0
    assert node.asked.read_text().splitlines() == [told], "what is carried already is left alone"
    (node.bundle / "logs.json").write_text(json.dumps(agent_configuration(spec_of("ec2-spot-g6e", {}))))
    assert node.boot(ON_INIT).returncode == 0
    assert len(node.asked.read_text().splitlines()) == 2
    assert (node.root / JOB_LOGS.lstrip("/")).stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize(
    ("name", "text"),
    [("gpg", GPG.format(signer="0" * 40)), ("curl", "#!/bin/bash\nexit 22\n"), ("apt-get", "#!/bin/bash\nexit 100\n")],
)
def test_node_without_an_agent_boots(node: Node, name: str, text: str) -> None:
    node.command(name, text)
    assert node.boot(ON_INIT).returncode == 0
    assert "WARNING: logs of this node do not go to CloudWatch" in node.log
    assert not (node.root / CONTROL).exists()
    assert not node.asked.exists()


def test_long_download_starts_no_dpkg_that_would_be_ended(node: Node) -> None:
    script = node.bundle / LOGS.name
    script.write_text(script.read_text().replace("AWS_REGION=us-east-2", "AWS_REGION=us-east-2 SECONDS=300"))
    assert node.boot(ON_INIT).returncode == 0
    assert "WARNING: logs of this node do not go to CloudWatch" in node.log
    assert "apt-get" not in node.mounts.read_text()


def test_first_boot_of_ec2_carries_logs_before_the_bundle_does(node: Node) -> None:
    assert node.boot(EC2).returncode == 0
    assert not node.asked.exists()
    script = (LOGS.parent / "first_boot.sh").read_text(encoding="ascii")
    assert script.index("\n  logs\n") < script.index("\n  lustre\n") < script.index("\n  from_bundle\n")
