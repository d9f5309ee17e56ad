"""HyperPod, EKS and the bundle as Pulumi resources: what waits for what, what stays, what other parts learn from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml
from pulumi.runtime import MockCallArgs, MockResourceArgs, Mocks

from infra.components.bundle import LifecycleBundle
from infra.components.eks import EksCluster, NodeAddons
from infra.components.hyperpod import HyperPod
from infra.config import parse
from infra.plan.nodes.bundle import Bundle, bundle
from infra.plan.nodes.eks import EksPlan, eks_plan
from infra.plan.place import Place
from tests.infra.edits import spec_of
from tests.infra.registered import Registered, run_on

PROGRAM = Path(__file__).parents[2] / "infra"
ARN = "arn:aws:sagemaker:us-east-2:123456789012:cluster/abcdefghijkl"
EKS_ARN = "arn:aws:eks:us-east-2:123456789012:cluster/vision-g6e"
ROLES = {key: f"arn:aws:iam::123456789012:role/{key}" for key in ("eks-cluster", "fsx-csi", "train-operator")}
BUCKET = "sagemaker-vision-g6e"
OURS = bundle(spec_of("hyperpod-eks-g6e-spot", {}))


class Service(Mocks):
    """Answers as AWS would."""

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[str, Any]]:
        if args.typ == "aws:cloudcontrol/resource:Resource":
            return ARN, dict(args.inputs)
        computed = {"arn": EKS_ARN} if args.typ == "aws:eks/cluster:Cluster" else {}
        return f"{args.name}-id", {**args.inputs, **computed}

    def call(self, args: MockCallArgs) -> dict[str, Any]:
        raise AssertionError(f"a component asked AWS for {args.token}")


def run(program: Callable[[], dict[str, pulumi.Output[Any]]]) -> tuple[Registered, dict[str, Any]]:
    return run_on(Registered(Service()), Service(), program)


def plan_of(**changes: Any) -> EksPlan:
    text = (PROGRAM / "Pulumi.hyperpod-eks-g6e-spot.yaml").read_text(encoding="utf-8")
    spec = parse({**yaml.safe_load(text)["config"]["lustrain:cluster"], **changes})
    return eks_plan(spec, Place("us-east-2", "123456789012"))


def eks_program(plan: EksPlan) -> dict[str, pulumi.Output[Any]]:
    cluster = EksCluster("eks", plan, ["subnet-a", "subnet-b"], ["sg-a"], ROLES)
    hyperpod = HyperPod("hyperpod", {"ClusterName": "vision-g6e"}, cluster.ready)
    NodeAddons("nodes", plan, cluster.name, hyperpod.ready)
    return {"name": cluster.name, "arn": cluster.arn}


def bundle_program(found: Bundle) -> dict[str, pulumi.Output[Any]]:
    made = LifecycleBundle("lifecycle", found, BUCKET)
    return {"uri": made.uri}


def test_the_bundle_lies_under_its_own_name_and_stays_when_the_stack_goes() -> None:
    ours = OURS
    made, values = run(lambda: bundle_program(ours))
    assert values["uri"] == f"s3://{BUCKET}/lifecycle/{ours.sha}"
    objects = made.named("aws:s3/bucketObjectv2:BucketObjectv2")
    assert {made.properties(name)["key"] for name in objects} == {ours.key(file) for file in ours.files}
    assert all(made.requests[name].retainOnDelete for name in objects)
    hashes = {made.properties(name)["key"]: made.properties(name)["sourceHash"] for name in objects}
    assert hashes == {ours.key(file): file.sha256 for file in ours.files}


def test_another_bundle_gives_other_resources_so_that_the_old_ones_are_let_go_not_changed() -> None:
    now, later = Bundle(OURS.files, "aaaaaaaaaaaa"), Bundle(OURS.files, "bbbbbbbbbbbb")
    kind = "aws:s3/bucketObjectv2:BucketObjectv2"
    before = set(run(lambda: bundle_program(now))[0].named(kind))
    after = set(run(lambda: bundle_program(later))[0].named(kind))
    assert len(before) == len(after) == len(OURS.files)
    assert not before & after


@pytest.mark.parametrize("protect", [True, False])
def test_hyperpod_goes_through_cloud_control_and_tells_its_arn_and_id(protect: bool) -> None:
    state = {"ClusterName": "llm", "InstanceGroups": [{"ExecutionRole": pulumi.Output.from_input("arn:role")}]}

    def program() -> dict[str, pulumi.Output[Any]]:
        first = LifecycleBundle("lifecycle", OURS, BUCKET)
        found = HyperPod("hyperpod", state, [first], protect=protect)
        return {"name": found.name, "arn": found.arn, "id": found.id}

    made, values = run(program)
    assert values == {"name": "llm", "arn": ARN, "id": "abcdefghijkl"}
    sent = made.properties("hyperpod-cluster")
    assert sent["typeName"] == "AWS::SageMaker::Cluster"
    assert json.loads(sent["desiredState"])["InstanceGroups"] == [{"ExecutionRole": "arn:role"}]
    request = made.requests["hyperpod-cluster"]
    assert (request.protect, request.deleteBeforeReplace) == (protect, True)
    assert made.waits_for("hyperpod-cluster") == set(made.named("aws:s3/bucketObjectv2:BucketObjectv2"))


def test_a_new_subnet_replaces_the_cluster_and_a_new_size_does_not() -> None:
    def trigger(**changes: Any) -> str:
        state = {"ClusterName": "a", "VpcConfig": {"Subnets": ["subnet-a"]}, "InstanceGroups": [], **changes}
        made, _ = run(lambda: {"arn": HyperPod("hyperpod", state).arn})
        return str(made.requests["hyperpod-cluster"].replacement_trigger.string_value)

    assert trigger() == trigger(InstanceGroups=[{"InstanceCount": 2}])
    assert trigger() != trigger(VpcConfig={"Subnets": ["subnet-b"]})


def test_the_same_wish_is_the_same_text_whatever_the_order_of_its_keys() -> None:
    def text(state: dict[str, Any]) -> str:
        made, _ = run(lambda: {"arn": HyperPod("hyperpod", state).arn})
        return str(made.properties("hyperpod-cluster")["desiredState"])

    assert text({"ClusterName": "a", "NodeRecovery": "None"}) == text({"NodeRecovery": "None", "ClusterName": "a"})


def test_the_control_plane_is_as_planned() -> None:
    made, values = run(lambda: eks_program(plan_of()))
    sent = made.properties("eks-cluster")
    assert (sent["name"], sent["version"], sent["roleArn"]) == ("vision-g6e", "1.35", ROLES["eks-cluster"])
    assert sent["upgradePolicy"] == {"supportType": "STANDARD"}
    assert sent["accessConfig"] == {"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": False}
    assert sent["vpcConfig"] == {
        "subnetIds": ["subnet-a", "subnet-b"],
        "securityGroupIds": ["sg-a"],
        "endpointPrivateAccess": True,
        "endpointPublicAccess": True,
        "publicAccessCidrs": ["203.0.113.0/24"],
    }
    private = run(lambda: eks_program(plan_of(eks={})))[0].properties("eks-cluster")["vpcConfig"]
    assert (private["endpointPublicAccess"], "publicAccessCidrs" in private) == (False, False)
    assert (values["name"], values["arn"]) == ("vision-g6e", EKS_ARN)
    assert list(made.requests["eks-cluster"].ignoreChanges) == ["accessConfig.bootstrapClusterCreatorAdminPermissions"]


def test_an_administrator_gets_an_entry_and_then_its_policy() -> None:
    made, _ = run(lambda: eks_program(plan_of()))
    assert made.properties("eks-admin-0")["principalArn"] == "arn:aws:iam::123456789012:role/platform"
    assert made.properties("eks-admin-0-policy")["accessScope"] == {"type": "cluster"}
    assert "eks-admin-0" in made.waits_for("eks-admin-0-policy")


def test_the_training_operator_waits_for_cert_manager_and_hyperpod_for_its_identity() -> None:
    made, _ = run(lambda: eks_program(plan_of(eks={"training_operator": True})))
    operator = "nodes-amazon-sagemaker-hyperpod-training-operator"
    assert made.waits_for(operator) >= {"nodes-cert-manager", "hyperpod-cluster"}
    assert "eks-train-operator" in made.waits_for("hyperpod-cluster")


def test_add_ons_that_need_nodes_wait_for_hyperpod_and_hyperpod_for_the_others() -> None:
    made, _ = run(lambda: eks_program(plan_of(storage={"lustre": {"throughput_gb_s": 1.0}})))
    assert made.waits_for("hyperpod-cluster") >= {
        "eks-vpc-cni",
        "eks-kube-proxy",
        "eks-eks-pod-identity-agent",
        "eks-fsx-csi",
    }
    for name in ("nodes-coredns", "nodes-aws-fsx-csi-driver"):
        assert "hyperpod-cluster" in made.waits_for(name)
        assert made.properties(name)["resolveConflictsOnCreate"] == "OVERWRITE"
    identity = made.properties("eks-fsx-csi")
    assert (identity["serviceAccount"], identity["roleArn"]) == ("fsx-csi-controller-sa", ROLES["fsx-csi"])
