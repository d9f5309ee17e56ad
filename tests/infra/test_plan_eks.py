"""The EKS control plane: private unless asked, entered by the API, add-ons in an order that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from infra.config import ClusterSpec, parse
from infra.plan.eks import EksPlan, eks_plan, helm_commands
from infra.plan.place import Place

STACK = Path(__file__).parents[2] / "infra" / "Pulumi.hyperpod-eks-g6e-spot.yaml"
PLACE = Place("us-east-2", "123456789012")
ADMIN = "arn:aws:iam::123456789012:role/platform"
WITH_LUSTRE = {"lustre": {"throughput_gb_s": 1.0}}


def spec_of(**changes: Any) -> ClusterSpec:
    return parse({**yaml.safe_load(STACK.read_text(encoding="utf-8"))["config"]["lustrain:cluster"], **changes})


def plan_of(**changes: Any) -> EksPlan:
    return eks_plan(spec_of(**changes), PLACE)


def test_the_version_is_the_users_and_the_endpoint_private_unless_asked() -> None:
    plan = plan_of()
    assert (plan.name, plan.version, plan.public_endpoint, plan.authentication_mode) == (
        "vision-g6e",
        "1.35",
        False,
        "API",
    )
    assert plan_of(eks={"public_endpoint": True}).public_endpoint
    assert {"api", "audit", "authenticator"} <= set(plan.log_types)


def test_named_administrators_enter_and_then_the_creator_is_none_of_his_own() -> None:
    plan = plan_of(access={"admin_roles": [ADMIN, ADMIN]})
    assert [(one.principal_arn, one.policy_arn) for one in plan.access] == [
        (ADMIN, "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy")
    ]
    assert not plan.creator_is_admin
    assert plan_of(access={}).creator_is_admin
    assert plan_of(access={}).access == ()


def test_the_policy_is_that_of_the_partition() -> None:
    china = eks_plan(spec_of(), Place("cn-north-1", "123456789012", "aws-cn"))
    assert china.access[0].policy_arn.startswith("arn:aws-cn:eks::aws:")


def test_what_needs_nodes_comes_after_them_and_each_add_on_after_what_it_needs() -> None:
    plan = plan_of(storage=WITH_LUSTRE)
    assert [addon.name for addon in plan.addons_before_nodes] == ["vpc-cni", "kube-proxy", "eks-pod-identity-agent"]
    assert [addon.name for addon in plan.addons_after_nodes] == ["coredns", "aws-fsx-csi-driver"]
    seen: set[str] = set()
    for addon in plan.addons:
        assert set(addon.after) <= seen
        seen.add(addon.name)


def test_the_lustre_driver_and_its_identity_come_with_lustre_only() -> None:
    assert "aws-fsx-csi-driver" not in {addon.name for addon in plan_of().addons}
    assert plan_of().pod_identities == ()
    identity = plan_of(storage=WITH_LUSTRE).pod_identities
    assert [(one.namespace, one.service_account, one.role) for one in identity] == [
        ("kube-system", "fsx-csi-controller-sa", "fsx-csi")
    ]


def test_the_chart_goes_in_before_hyperpod_at_a_fixed_revision() -> None:
    commands = helm_commands(spec_of(), PLACE)
    assert "--exclude '**lustrain:infra:HyperPod**'" in commands[0]
    assert commands[1] == "aws eks update-kubeconfig --name vision-g6e --region us-east-2"
    assert any(" checkout " in command and len(command.split()[-1]) == 40 for command in commands)
    assert commands[-1] == "pulumi up"
    assert sum(command.startswith("helm upgrade --install hyperpod-dependencies") for command in commands) == 1


def test_other_backends_need_no_chart() -> None:
    assert (
        helm_commands(
            spec_of(backend="hyperpod-slurm", groups=[{"name": "a", "instance_type": "p5.48xlarge", "count": 1}]), PLACE
        )
        == ()
    )
