"""Machines on which people submit jobs to a Slurm of the stack's own: what they are, and what their role may not do."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from infra.local.mocks import Recorder
from infra.plan.nodes.user_data import SlurmIds, facts
from infra.plan.place import bucket_names
from infra.plan.roles import roles
from infra.plan.stack import Plan
from infra.preflight.explain import explain
from lustrain.cluster import parse
from tests.infra.edits import GONE, place, spec_of
from tests.infra.mistakes import NODE_ROLE, PROFILE
from tests.infra.registered import Registered, built

STACK = "ec2-slurm-g6e"
TEMPLATE, GROUP = "aws:ec2/launchTemplate:LaunchTemplate", "aws:autoscaling/group:Group"
HOOK, NEAR = "aws:autoscaling/lifecycleHook:LifecycleHook", "aws:ec2/placementGroup:PlacementGroup"
IDS = SlurmIds("10.0.64.10", "arn:aws:secretsmanager:us-east-1:123456789012:secret:s", "vol-0123456789abcdef0")


@pytest.fixture(scope="module")
def made() -> tuple[Registered, dict[str, Any]]:
    return built(STACK, {}, Recorder("us-east-1"))


def rights(key: str, **edits: Any) -> dict[str, set[str]]:
    """The resources at which a role may do each action."""
    found = {role.key: role for role in roles(spec_of(STACK, edits), place(STACK))}
    policy, at = found[key].policy, {}
    assert policy
    for statement in policy["Statement"]:
        named = [statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"]
        for action in statement["Action"]:
            at.setdefault(action, set()).update(named)
    return at


def test_login_is_a_small_group_without_ranks(made: tuple[Registered, dict[str, Any]]) -> None:
    resources, outputs = made
    groups, templates = resources.of(GROUP), resources.of(TEMPLATE)
    assert {name: (one["minSize"], one["maxSize"]) for name, one in groups.items()} == {
        "slurm-g6e-train-gang": (4, 4),
        "slurm-g6e-login-gang": (1, 1),
    }
    login = templates["slurm-g6e-login-ubuntu-24-04-x86-64"]
    assert not {"placement", "cpuOptions", "instanceMarketOptions"} & set(login)
    assert list(resources.of(HOOK)) == ["slurm-g6e-train-save"], "a login has nothing to save"
    assert list(resources.of(NEAR)) == ["slurm-g6e-train-near"]
    profiles = {name: one["iamInstanceProfile"]["arn"] for name, one in templates.items()}
    assert len(set(profiles.values())) == 2, "each has a role of its own"
    assert len(parse(outputs["cluster"]).nodes.auto_scaling_groups) == 2, "fab node-tune finds both"
    script = base64.b64decode(login["userData"]).decode()
    assert '"duty": "client"' in script


def test_login_hears_of_no_queue_and_no_end() -> None:
    ends = {"mode": "capacity-block", "reservation": "cr-0a1b2c3d4e5f60718", "ends_at": "2027-02-14T11:30:00Z"}
    spec = spec_of(STACK, {"groups.0.capacity": ends})
    told = {
        group.name: facts(spec, place(STACK), group, lustre=False, home=False, queue_url="queue", slurm=IDS)
        for group in spec.groups
    }
    assert [told["train"][key] is None for key in ("interruption_queue", "ends_at")] == [False, False]
    assert [told["login"][key] for key in ("interruption_queue", "ends_at", "efa")] == [None, None, 0]


def test_login_with_efa_in_its_type_attaches_none() -> None:
    spec = spec_of(STACK, {"groups.1.instance_type": "c7i.48xlarge"})
    (_, login) = Plan(spec, place(STACK)).node_groups
    assert [interface.type for interface in login.interfaces] == [None]


def test_role_of_a_login_has_nothing_that_only_training_needs() -> None:
    node, login = rights("node"), rights("login")
    spec = spec_of(STACK, {})
    assert {action.partition(":")[0] for action in set(node) - set(login)} == {
        "autoscaling",
        "ec2",
        "ecr",
        "fsx",
        "s3",
        "sqs",
    }
    assert set(login) <= set(node)
    runs = f"arn:aws:s3:::{bucket_names(spec, place(STACK)).checkpoints}/runs/"
    changed = login["s3:PutObject"] | login["s3:DeleteObject"]
    assert changed == {f"{runs}*/launch/*", f"{runs}*/sweep.json"}, "requests, and no checkpoint"
    assert f"{runs}*" in login["s3:GetObject"]
    assert login["cloudwatch:PutMetricData"] == {"*"}
    groups = {arn.partition("log-group:")[2] for arn in login["logs:PutLogEvents"]}
    assert groups == {"/lustrain/slurm-g6e/node", "/lustrain/slurm-g6e/node:*"}


def test_login_submits_to_buckets_that_have_a_key() -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"
    assert rights("login", **{"buckets.kms_key": key})["kms:GenerateDataKey"] == {key}


def test_named_role_of_nodes_is_that_of_logins_too() -> None:
    own = spec_of(STACK, {"access": {"node_role": NODE_ROLE, "instance_profile": PROFILE}})
    assert [role.key for role in roles(own, place(STACK))] == ["node"]


def test_notices_and_metrics_of_ranks_leave_logins_out() -> None:
    plan = Plan(spec_of(STACK, {"alarms.unread_notices": True, "observability.prometheus": "self"}), place(STACK))
    assert "slurm-g6e-login" not in json.dumps([signal.pattern for signal in plan.channel.signals])
    (unread,) = [alarm for alarm in plan.observability.alarms if alarm.name.endswith("notices-unread")]
    assert "group:login" not in {metric.subject for metric in unread.metrics}
    assert plan.monitor
    assert set(plan.monitor.settings.rankless) == {"controller", "login", "monitor"}


def test_an_added_login_leaves_running_nodes_alone() -> None:
    without, beside = spec_of(STACK, {"groups.1": GONE}), spec_of(STACK, {})
    found = {change.path: change.effect.name for change in explain(without, beside)}
    assert "groups (login)" in found
    assert not {"WIPES", "REPLACES_NODES", "REPLACES_CLUSTER"} & set(found.values()), found
