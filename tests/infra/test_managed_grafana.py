"""`grafana: managed` by `pulumi up`: the workspace, what its role may read, what is left by hand, and what an update does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.clock import now
from infra.plan.cost import cost
from infra.plan.deployer_policy import deployer_policy
from infra.plan.stack import Plan
from infra.plan.teardown import first_steps, teardown
from infra.policy.checks import BILLED
from infra.preflight.change import Effect
from infra.preflight.explain import explain
from infra.preflight.offline import run_offline
from tests.infra.edits import place, spec_of
from tests.infra.mistakes import EKS, SLURM
from tests.infra.registered import built, waits_for

WORKSPACE = "aws:grafana/workspace:Workspace"
MANAGED = {"observability": {"prometheus": "amp", "grafana": "managed"}}


@pytest.mark.parametrize("stack", [EKS, SLURM])
def test_workspace_signs_people_in_and_has_its_role(stack: str) -> None:
    resources, outputs = built(stack, MANAGED)
    name = spec_of(stack, {}).name
    (workspace,) = resources.of(WORKSPACE).values()
    assert (workspace["authenticationProviders"], workspace["permissionType"], workspace["accountAccessType"]) == (
        ["AWS_SSO"],
        "CUSTOMER_MANAGED",
        "CURRENT_ACCOUNT",
    )
    assert workspace["tags"]["lustrain:cluster"] == name
    assert f"{name}-grafana" in workspace["roleArn"]
    assert f"{name}-grafana" in waits_for(resources.only(WORKSPACE))
    assert outputs["grafana"] == f"https://g-mock.grafana-workspace.{place(stack).region}.amazonaws.com"
    assert WORKSPACE in BILLED


def test_role_queries_this_clusters_workspace_and_writes_nothing() -> None:
    plan = Plan(spec_of(EKS, MANAGED), place(EKS))
    (role,) = [one for one in plan.roles if one.key == "grafana"]
    assert role.policy
    (trusted,) = role.trust["Statement"]
    assert trusted["Principal"] == {"Service": "grafana.amazonaws.com"}
    assert trusted["Condition"]["StringEquals"] == {"aws:SourceAccount": place(EKS).account}
    actions = {action for one in role.policy["Statement"] for action in one["Action"]}
    verbs = ("Describe", "Get", "List", "Query")
    assert not [action for action in actions if not action.partition(":")[2].startswith(verbs) or "*" in action]
    (query,) = [one for one in role.policy["Statement"] if "aps:QueryMetrics" in one["Action"]]
    assert query["Condition"]["StringEquals"] == {"aws:ResourceTag/lustrain:cluster": plan.spec.name}
    assert "logs:" not in json.dumps(role.policy)
    assert trusted["Condition"]["StringLike"] == {
        "aws:SourceArn": f"arn:aws:grafana:{place(EKS).region}:{place(EKS).account}:/workspaces/*"
    }


def test_deployer_may_do_what_making_and_deleting_depend_on() -> None:
    """By AWS's service authorization reference: the workspace is enrolled in IAM Identity Center with its maker's rights."""
    depended = {
        "organizations:DescribeOrganization",
        *(f"sso:{name}ManagedApplicationInstance" for name in ("Create", "Delete")),
        *(f"sso:{name}" for name in ("DescribeRegisteredRegions", "GetSharedSsoConfiguration")),
    }

    def allowed(edits: dict[str, Any]) -> tuple[set[str], str]:
        statements = deployer_policy(spec_of(EKS, edits), place(EKS))["Statement"]
        return {action for one in statements for action in one["Action"]}, json.dumps(statements)

    actions, text = allowed(MANAGED)
    assert depended <= actions
    assert "grafana.amazonaws.com" in text
    others, without = allowed({"observability": {"prometheus": "amp"}})
    assert not depended & others
    assert "grafana" not in without


def test_preflight_passes_it_with_a_workspace_of_prometheus() -> None:
    assert not [one for one in run_offline(spec_of(EKS, MANAGED), place(EKS)) if one.code.startswith("OBS")]


def test_what_it_costs_and_what_is_left_by_hand_are_named() -> None:
    plan = Plan(spec_of(EKS, MANAGED), place(EKS))
    (part,) = [one for one in cost(plan).parts if one.name == "Grafana"]
    assert part.usd_month == pytest.approx(9.0)
    assert "5.0 for each other person" in part.note
    assert sum("Amazon Managed" in line for line in first_steps(plan)) == 2
    lines = teardown(plan)
    export, destroy = (
        next(i for i, line in enumerate(lines) if word in line) for word in ("Grafana", "pulumi destroy")
    )
    assert export < destroy


def test_its_end_deletes_what_people_made_in_it() -> None:
    without, with_it = spec_of(EKS, {"observability": {"prometheus": "amp"}}), spec_of(EKS, MANAGED)
    (made,) = explain(without, with_it, now())
    (gone,) = explain(with_it, without, now())
    assert [(one.path, one.effect) for one in (made, gone)] == [
        ("observability.grafana", Effect.IN_PLACE),
        ("observability.grafana", Effect.DELETES_OBJECTS),
    ]
