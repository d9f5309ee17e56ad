"""The EKS control plane: private unless asked, entered by the API, add-ons in an order that works."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from infra.plan.nodes.eks import CHART_FOLDER, LOGS_ROLE, EksPlan, eks_plan, first_up, helm_commands, helm_place
from infra.plan.nodes.logs import ADDON
from infra.plan.place import Place
from tests.infra.edits import spec_of
from tests.infra.mistakes import EKS, JOINED, SLURM

PLACE = Place("us-east-2", "123456789012")
ADMIN = "arn:aws:iam::123456789012:role/platform"
SSO = "arn:aws:iam::123456789012:role/aws-reserved/sso.amazonaws.com/AWSReservedSSO_platform_0a1b2c3d4e5f6071"
WITH_LUSTRE = {"lustre": {"throughput_gb_s": 1.0}}


def plan_of(**edits: Any) -> EksPlan:
    return eks_plan(spec_of(EKS, edits), PLACE)


def test_named_administrators_enter_and_the_creator_is_none() -> None:
    plan = plan_of(access={"admin_roles": [ADMIN, ADMIN]})
    assert [one.principal_arn for one in plan.access] == [ADMIN]
    assert not plan.creator_is_admin
    assert plan_of(access={}).creator_is_admin
    assert plan_of(access={}).access == ()


def test_the_policy_is_that_of_the_partition() -> None:
    china = eks_plan(spec_of(EKS, {}), Place("cn-north-1", "123456789012", "aws-cn"))
    assert china.access[0].policy_arn.startswith("arn:aws-cn:eks::aws:")


def test_the_lustre_driver_and_add_ons_come_after_what_they_need() -> None:
    plan = plan_of(storage=WITH_LUSTRE)
    assert [addon.name for addon in plan.addons_before_nodes] == ["vpc-cni", "kube-proxy", "eks-pod-identity-agent"]
    assert [addon.name for addon in plan.addons_after_nodes] == ["coredns", "aws-fsx-csi-driver", ADDON]
    seen: set[str] = set()
    for addon in plan.addons:
        assert set(addon.after) <= seen
        seen.add(addon.name)
    identity, _ = plan.pod_identities
    found = (identity.namespace, identity.service_account, identity.role)
    assert found == ("kube-system", "fsx-csi-controller-sa", "fsx-csi")
    assert [one.role for one in plan_of().pod_identities] == [LOGS_ROLE]


def test_governance_and_operator_come_after_what_they_need() -> None:
    plan = plan_of(eks={"task_governance": True, "training_operator": True})
    names = [addon.name.removeprefix("amazon-sagemaker-hyperpod-") for addon in plan.addons_after_nodes]
    assert names == ["coredns", ADDON, "taskgovernance", "cert-manager", "training-operator"]
    assert plan.addons[-1].after == ("cert-manager",)
    identity, _ = plan.pod_identities
    found = (identity.namespace, identity.service_account, identity.role)
    assert found == ("aws-hyperpod", "hp-training-operator-controller-manager", "train-operator")


PROGRAMS = {
    "pulumi": """case "$*" in
"up --exclude **lustrain:infra:HyperPod** --exclude-dependents") echo plane >>$MADE;;
up) grep -q installed $MADE; echo nodes >>$MADE;;
*) exit 2;; esac""",
    "aws": f"""[ "$*" = "eks update-kubeconfig --name vision-g6e --region us-east-2 --role-arn {ADMIN}" ]
grep -q plane $MADE; echo entry >>$MADE""",
    "kubectl": """[ "$1 $2" = "auth can-i" ]; grep -q entry $MADE; echo yes""",
    "git": """if [ $1 = clone ]; then mkdir $3; mkdir -p $3/helm_chart/HyperPodHelmChart; echo chart >>$MADE; exit; fi
[ $1 = -C ]; cd $2
case $3 in
fetch) echo news >>$MADE;;
checkout) grep -q news $MADE; [ ${#4} = 40 ]; echo pinned >>$MADE;;
*) exit 2;; esac""",
    "helm": """grep -q pinned $MADE; grep -q entry $MADE
case "$1 $2" in
"dependency update") cd $3; echo fetched >>$MADE;;
"upgrade --install") grep -q fetched $MADE; cd $4; [ "$5 $6" = "--namespace kube-system" ]; echo installed >>$MADE;;
*) exit 2;; esac""",
}


def test_the_first_steps_work_as_they_are_typed_and_typed_again(tmp_path: Path) -> None:
    """Each program is one that keeps AWS's order: it fails where what it needs is not there yet."""
    (tmp_path / "bin").mkdir()
    for name, body in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh -e\n{body}", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    # In a folder of this test's own instead of /tmp, which the commands name.
    commands = [line.replace(CHART_FOLDER, str(tmp_path / "chart")) for line in helm_commands(spec_of(EKS, {}), PLACE)]
    done = subprocess.run(
        ["sh", "-e", "-c", "\n".join(commands * 2)],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "MADE": str(tmp_path / "made")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    order = ["plane", "entry", "chart", "news", "pinned", "fetched", "installed", "nodes"]
    again = [step for step in order if step != "chart"]
    assert (tmp_path / "made").read_text(encoding="utf-8").split() == [*order, *again]


def test_kubeconfig_assumes_the_first_admin_role_that_it_can() -> None:
    edits = {"access": {"admin_roles": [SSO, ADMIN]}}
    kubeconfig = next(line for line in helm_commands(spec_of(EKS, edits), PLACE) if "update-kubeconfig" in line)
    assert kubeconfig.endswith(f" --role-arn {ADMIN}")
    assert helm_place(spec_of(EKS, edits)).endswith(f"assume {ADMIN}")


def test_the_first_steps_say_from_where_and_as_whom() -> None:
    only_sso = spec_of(EKS, {"access": {"admin_roles": [SSO]}})
    assert helm_place(only_sso) == f"from an address in 203.0.113.0/24, as {SSO}"
    assert not any("--role-arn" in line for line in helm_commands(only_sso, PLACE))
    private = helm_place(spec_of(EKS, {"eks": {}, "access": {}}))
    assert private == "from a machine inside the VPC, with the credentials of the first `pulumi up`"


def test_existing_cluster_gets_the_chart_before_the_first_up() -> None:
    note, *steps = first_up(spec_of(EKS, JOINED), PLACE)
    assert "EKS cluster platform needs HyperPod's Helm chart" in note
    assert steps[0] == "  aws eks update-kubeconfig --name platform --region us-east-2"
    assert steps[-1] == "  pulumi up"
    assert not any("--exclude" in step for step in steps)


def test_other_backends_need_no_chart() -> None:
    assert helm_commands(spec_of(SLURM, {}), PLACE) == ()
