"""The desired state of each HyperPod stack is what CloudFormation's schema and CreateCluster's model allow, and what was
reviewed: tests/infra/golden holds it.

After a wanted change: `LUSTRAIN_GOLDEN=write pytest tests/infra/test_plan_hyperpod.py`, then read the difference.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cfnlint
import pytest
import yaml
from botocore.loaders import Loader
from botocore.model import OperationModel, ServiceModel
from botocore.validate import ParamValidator
from cfnlint.api import ManualArgs, lint

from infra.config import ClusterSpec, parse
from infra.plan.nodes.hyperpod import (
    TYPE,
    HomeMount,
    Mount,
    Refs,
    create_only,
    desired_state,
    protected,
    ssm_target,
)
from infra.plan.place import Place

PROGRAM = Path(__file__).parents[2] / "infra"
SCHEMAS = Path(cfnlint.__file__).with_name("data") / "schemas"
GOLDEN = Path(__file__).with_name("golden")
SLURM, EKS = "hyperpod-slurm-p5", "hyperpod-eks-g6e-spot"
STACKS = [SLURM, EKS]
KARPENTER = "arn:aws:iam::123456789012:role/lustrain/vision-g6e/karpenter"
State = dict[str, Any]


def config_of(stack: str) -> dict[str, Any]:
    return dict(yaml.safe_load((PROGRAM / f"Pulumi.{stack}.yaml").read_text(encoding="utf-8"))["config"])


def spec_of(stack: str, **changes: Any) -> ClusterSpec:
    return parse({**config_of(stack)["lustrain:cluster"], **changes})


def place_of(stack: str) -> Place:
    return Place(config_of(stack)["aws:region"], "123456789012")


def refs_of(stack: str) -> Refs:
    spec, place = spec_of(stack), place_of(stack)
    lustre = Mount(f"fs-0123456789abcdef0.fsx.{place.region}.amazonaws.com", "abcd1234", "/fsx")
    return Refs(
        role_arn=place.arn("iam", f"role/{spec.name}-node", region=""),
        subnet_id="subnet-0123456789abcdef0",
        security_group_ids=["sg-0123456789abcdef0"],
        lifecycle_uri=f"s3://sagemaker-{spec.name}-123456789012-{place.region}/lifecycle/0123456789ab",
        lustre=lustre if spec.storage.lustre else None,
        eks_cluster_arn=place.arn("eks", f"cluster/{spec.name}"),
    )


def state_of(stack: str, **changes: Any) -> State:
    return desired_state(spec_of(stack, **changes), refs_of(stack))


def group_of(state: State, name: str) -> State:
    return dict(next(group for group in state["InstanceGroups"] if group["InstanceGroupName"] == name))


def with_group(stack: str, number: int, **changes: Any) -> State:
    """The state after `changes` to one group of the stack's configuration; None takes a key away."""
    groups = copy.deepcopy(config_of(stack)["lustrain:cluster"]["groups"])
    groups[number].update(changes)
    groups[number] = {key: value for key, value in groups[number].items() if value is not None}
    return state_of(stack, groups=groups)


def schema_errors(state: State, region: str) -> list[str]:
    """What cfn-lint says of the state as a template's only resource."""
    template = {"AWSTemplateFormatVersion": "2010-09-09", "Resources": {"Cluster": {"Type": TYPE, "Properties": state}}}
    found = lint(json.dumps(template), config=ManualArgs(regions=[region]))
    return [match.message for match in found]


def model_errors(state: State) -> str:
    """What the API's own model says of the state as the parameters of CreateCluster."""
    service = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    operation: OperationModel = service.operation_model("CreateCluster")
    return str(ParamValidator().validate(state, operation.input_shape).generate_report())


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
def test_the_schema_and_the_model_allow_the_state(stack: str) -> None:
    state = state_of(stack)
    assert schema_errors(state, place_of(stack).region) == []
    assert model_errors(state) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("karpenter", "wanted"),
    [
        (True, {"AutoScaling": {"Mode": "Enable", "AutoScalerType": "Karpenter"}, "ClusterRole": KARPENTER}),
        (False, {"AutoScaling": {"Mode": "Disable"}}),
        (None, {}),
    ],
)
def test_karpenter_comes_with_its_role_and_is_told_to_stop(karpenter: bool | None, wanted: State) -> None:
    refs = replace(refs_of(EKS), cluster_role_arn=KARPENTER)
    state = desired_state(spec_of(EKS, eks={"karpenter": karpenter}), refs)
    assert {key: value for key, value in state.items() if key in ("AutoScaling", "ClusterRole")} == wanted
    assert (schema_errors(state, "us-east-2"), model_errors(state)) == ([], "")
    assert "AutoScaling" not in state_of(SLURM, eks={"karpenter": True})


@pytest.mark.parametrize("stack", STACKS)
def test_the_state_is_the_reviewed_one(stack: str) -> None:
    path = GOLDEN / f"{stack}.json"
    text = json.dumps(state_of(stack), indent=2) + "\n"
    if os.environ.get("LUSTRAIN_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "after a wanted change: see the head of this file"


def _worker(state: State) -> None:
    state["InstanceGroups"][-1]["SlurmConfig"]["NodeType"] = "Worker"


def _two_partitions(state: State) -> None:
    state["InstanceGroups"][-1]["SlurmConfig"]["PartitionNames"].append("more")


def _misspelled(state: State) -> None:
    state["InstanceGroups"][-1]["LifecycleConfig"] = state["InstanceGroups"][-1].pop("LifeCycleConfig")


def _bad_recovery(state: State) -> None:
    state["NodeRecovery"] = "Automatik"


def _both_orchestrators(state: State) -> None:
    state["Orchestrator"]["Eks"] = {"ClusterArn": "arn:aws:eks:us-west-2:123456789012:cluster/x"}


def _long_mount_name(state: State) -> None:
    state["InstanceGroups"][-1]["InstanceStorageConfigs"][-1]["FsxLustreConfig"]["MountName"] = "ninechars"


def _no_role(state: State) -> None:
    del state["InstanceGroups"][-1]["ExecutionRole"]


@pytest.mark.parametrize(
    "plant", [_worker, _two_partitions, _misspelled, _bad_recovery, _both_orchestrators, _long_mount_name, _no_role]
)
@pytest.mark.slow
def test_the_schema_finds_a_planted_mistake(plant: Callable[[State], None]) -> None:
    state = state_of(SLURM)
    plant(state)
    assert schema_errors(state, "us-west-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"),
    [(_misspelled, "Unknown parameter"), (_no_role, "Missing required parameter")],
)
def test_the_model_finds_a_planted_mistake(plant: Callable[[State], None], said: str) -> None:
    state = state_of(SLURM)
    plant(state)
    assert said in model_errors(state)


def test_slurm_is_driven_by_the_api_and_each_group_has_its_part() -> None:
    state = state_of(SLURM)
    assert state["Orchestrator"] == {"Slurm": {"SlurmConfigStrategy": "Managed"}}
    assert [group["SlurmConfig"] for group in state["InstanceGroups"]] == [
        {"NodeType": "Controller"},
        {"NodeType": "Login"},
        {"NodeType": "Compute", "PartitionNames": ["train"]},
    ]
    assert {tuple(group["LifeCycleConfig"])[1] for group in state["InstanceGroups"]} == {"OnInitComplete"}


def test_a_worker_without_a_partition_is_in_one_of_its_own_name() -> None:
    assert group_of(with_group(SLURM, 2, partition=None, name="big"), "big")["SlurmConfig"]["PartitionNames"] == ["big"]


def test_only_groups_with_accelerators_are_checked_deeply() -> None:
    checks = {
        group["InstanceGroupName"]: group.get("OnStartDeepHealthChecks") for group in state_of(SLURM)["InstanceGroups"]
    }
    assert checks == {"controller": None, "login": None, "train": ["InstanceStress", "InstanceConnectivity"]}
    assert "OnStartDeepHealthChecks" not in group_of(with_group(SLURM, 2, deep_health_checks=[]), "train")


@pytest.mark.slow
def test_slurm_nodes_mount_lustre_and_homes_by_the_service_and_eks_nodes_mount_none() -> None:
    refs = refs_of(SLURM)
    home = HomeMount("fs-0fedcba9876543210.fsx.us-west-2.amazonaws.com", "/home")
    both = Refs(**{**vars(refs), "home": home})
    state = desired_state(spec_of(SLURM), both)
    for group in state["InstanceGroups"]:
        kinds = [next(iter(one)) for one in group["InstanceStorageConfigs"]]
        assert kinds == ["EbsVolumeConfig", "FsxLustreConfig", "FsxOpenZfsConfig"]
    assert schema_errors(state, "us-west-2") == []
    eks = desired_state(spec_of(EKS), both)
    assert all(len(group["InstanceStorageConfigs"]) == 1 for group in eks["InstanceGroups"])


def test_without_lustre_no_group_mounts_one() -> None:
    state = desired_state(spec_of(SLURM), Refs(**{**vars(refs_of(SLURM)), "lustre": None}))
    assert "FsxLustreConfig" not in json.dumps(state)


def test_capacity_comes_from_where_the_group_says() -> None:
    train = group_of(state_of(SLURM), "train")
    assert train["TrainingPlanArn"] == "arn:aws:sagemaker:us-west-2:123456789012:training-plan/llm-p5"
    assert "CapacityRequirements" not in train
    spot = group_of(state_of(EKS), "spot")
    assert spot["CapacityRequirements"] == {"Spot": {}}
    assert "TrainingPlanArn" not in spot
    system = group_of(state_of(EKS), "system")
    assert not {"CapacityRequirements", "TrainingPlanArn"} & set(system)


@pytest.mark.slow
def test_a_group_in_another_zone_lies_in_the_subnet_there() -> None:
    groups = copy.deepcopy(config_of(SLURM)["lustrain:cluster"]["groups"])
    groups[1]["zone_id"] = "usw2-az3"
    refs = Refs(**{**vars(refs_of(SLURM)), "zone_subnet_ids": {"usw2-az3": "subnet-0fedcba9876543210"}})
    state = desired_state(spec_of(SLURM, groups=groups), refs)
    override = {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0fedcba9876543210"]}
    assert [group.get("OverrideVpcConfig") for group in state["InstanceGroups"]] == [None, override, None]
    assert state["VpcConfig"]["Subnets"] == ["subnet-0123456789abcdef0"]
    assert (schema_errors(state, "us-west-2"), model_errors(state)) == ([], "")


KEY = "arn:aws:kms:us-west-2:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.slow
def test_a_group_may_have_an_image_a_key_and_patches_of_its_own() -> None:
    wished = {"image_id": "ami-0123456789abcdef0", "auto_patch": "WhenAllIdle", "volume_kms_key": KEY}
    state = with_group(SLURM, 2, **wished)
    train = group_of(state, "train")
    assert (train["ImageId"], train["AutoPatchConfig"]) == (wished["image_id"], {"PatchingStrategy": "WhenAllIdle"})
    assert [one["EbsVolumeConfig"] for one in train["InstanceStorageConfigs"][:2]] == [
        {"RootVolume": True, "VolumeKmsKeyId": KEY},
        {"VolumeSizeInGB": 500, "VolumeKmsKeyId": KEY},
    ]
    assert not {"ImageId", "AutoPatchConfig"} & set(group_of(state, "login"))
    assert "RootVolume" not in json.dumps(group_of(state, "login"))
    assert (schema_errors(state, "us-west-2"), model_errors(state)) == ([], "")


@pytest.mark.slow
def test_slurm_keeps_its_accounts_in_a_database_of_the_users_where_one_is_named() -> None:
    secret = "arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-AbCdEf"
    named = {"endpoint": "slurm.abc.us-west-2.rds.amazonaws.com", "secret_arn": secret}
    state = state_of(SLURM, slurm={"accounting": named})
    found = state["Orchestrator"]["Slurm"]["AccountingDatabase"]
    assert found == {"Endpoint": named["endpoint"], "Port": 3306, "SecretArn": secret}
    assert (schema_errors(state, "us-west-2"), model_errors(state)) == ([], "")
    other = state_of(SLURM, slurm={"accounting": {**named, "name": "slurm_acct_db"}})
    assert other["Orchestrator"]["Slurm"]["AccountingDatabase"]["Name"] == "slurm_acct_db"
    assert "Slurm" not in state_of(EKS, slurm={"accounting": named})["Orchestrator"]


def test_a_group_goes_on_with_fewer_only_where_it_says_so() -> None:
    assert group_of(state_of(EKS), "spot")["MinInstanceCount"] == 0
    assert "MinInstanceCount" not in group_of(state_of(EKS), "system")


@pytest.mark.slow
def test_kubernetes_nodes_have_labels_and_taints_and_a_taint_without_value_stays_legal() -> None:
    spot = group_of(state_of(EKS), "spot")
    assert spot["KubernetesConfig"] == {
        "Labels": {"lustrain.dev/role": "worker"},
        "Taints": [{"Key": "lustrain.dev/spot", "Value": "true", "Effect": "NoSchedule"}],
    }
    assert "KubernetesConfig" not in group_of(state_of(EKS), "system")
    bare = with_group(EKS, 1, labels={}, taints=[{"key": "busy"}])
    assert group_of(bare, "spot")["KubernetesConfig"] == {"Taints": [{"Key": "busy", "Effect": "NoSchedule"}]}
    assert schema_errors(bare, "us-east-2") == []


def test_tiered_checkpoint_storage_is_for_eks_and_only_where_wished() -> None:
    assert state_of(EKS)["TieredStorageConfig"] == {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 20}
    assert "TieredStorageConfig" not in state_of(EKS, eks={})
    assert "TieredStorageConfig" not in state_of(SLURM, eks={"tiered_memory_percent": 20})


def test_the_users_tags_and_ours_are_on_the_cluster() -> None:
    tags = {tag["Key"]: tag["Value"] for tag in state_of(SLURM, tags={"team": "llm"})["Tags"]}
    assert tags == {"lustrain:cluster": "llm-p5", "lustrain:backend": "hyperpod-slurm", "team": "llm"}


def test_nothing_is_said_as_none() -> None:
    for stack in STACKS:
        assert "null" not in json.dumps(state_of(stack))


def test_what_replaces_a_cluster_is_what_the_schema_calls_create_only() -> None:
    version = json.loads((SCHEMAS / "providers" / "us-west-2.json").read_text(encoding="utf-8"))[TYPE]
    schema = json.loads((SCHEMAS / "resources" / f"{version}.json").read_text(encoding="utf-8"))
    paths = {path.removeprefix("/properties/").removeprefix("Orchestrator/") for path in schema["createOnlyProperties"]}
    assert set(create_only(state_of(EKS))) == paths
    assert set(create_only(state_of(SLURM))) == paths - {"Eks"}


def test_a_change_of_size_replaces_nothing_and_another_subnet_does() -> None:
    assert create_only(with_group(SLURM, 2, count=40)) == create_only(state_of(SLURM))
    elsewhere = Refs(**{**vars(refs_of(SLURM)), "subnet_id": "subnet-0fedcba9876543210"})
    moved = desired_state(spec_of(SLURM), elsewhere)
    assert create_only(moved) != create_only(state_of(SLURM))


def test_a_cluster_on_a_training_plan_is_protected_and_one_on_spot_is_not() -> None:
    assert protected(spec_of(SLURM))
    assert not protected(spec_of(EKS))


def test_where_nodes_are_found() -> None:
    target = ssm_target("abcdefghijkl").format(group="train", instance_id="i-0123456789abcdef0")
    assert target == "sagemaker-cluster:abcdefghijkl_train-i-0123456789abcdef0"
