"""The desired state of a HyperPod cluster is what CloudFormation's schema and CreateCluster's model allow.

What the example stacks wish is pinned by tests/test_golden.py; here is what other wishes change.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cfnlint
import pytest
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from infra.plan.nodes.hyperpod import TYPE, HomeMount, Mount, Refs, create_only, desired_state, protected, ssm_target
from tests.infra.cloudformation import complaints
from tests.infra.edits import GONE, place, spec_of
from tests.infra.mistakes import EKS, SLURM

SCHEMAS = Path(cfnlint.__file__).with_name("data") / "schemas"
STACKS = [SLURM, EKS]
KARPENTER = "arn:aws:iam::123456789012:role/lustrain/vision-g6e/karpenter"
KEY = "arn:aws:kms:us-west-2:123456789012:key/01234567-89ab-cdef-0123-456789abcdef"
HOME = HomeMount("fs-0fedcba9876543210.fsx.us-west-2.amazonaws.com", "/home")
State = dict[str, Any]


def refs_of(stack: str) -> Refs:
    spec, where = spec_of(stack, {}), place(stack)
    lustre = Mount(f"fs-0123456789abcdef0.fsx.{where.region}.amazonaws.com", "abcd1234", "/fsx")
    return Refs(
        role_arn=where.arn("iam", f"role/{spec.name}-node", region=""),
        subnet_id="subnet-0123456789abcdef0",
        security_group_ids=["sg-0123456789abcdef0"],
        lifecycle_uri=f"s3://sagemaker-{spec.name}-123456789012-{where.region}/lifecycle/0123456789ab",
        lustre=lustre if spec.storage.lustre else None,
        eks_cluster_arn=where.arn("eks", f"cluster/{spec.name}"),
    )


def state_of(stack: str, edits: dict[str, Any] | None = None, **refs: Any) -> State:
    return desired_state(spec_of(stack, edits or {}), replace(refs_of(stack), **refs))


def group_of(state: State, name: str) -> State:
    return dict(next(group for group in state["InstanceGroups"] if group["InstanceGroupName"] == name))


def errors(state: State, stack: str) -> list[str]:
    """What cfn-lint says of the state as a template's resource, and the API's model of it as CreateCluster's parameters."""
    service = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    shape = service.operation_model("CreateCluster").input_shape
    assert shape is not None
    report = ParamValidator().validate(state, shape)
    return [*complaints(TYPE, state, place(stack).region), *filter(None, [str(report.generate_report())])]


@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS)
def test_schema_and_the_model_allow_the_state_but_no_misspelling(stack: str) -> None:
    state = state_of(stack)
    assert errors(state, stack) == []
    group = state["InstanceGroups"][-1]
    group["LifecycleConfig"] = group.pop("LifeCycleConfig")
    assert len(errors(state, stack)) > 1


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
    state = state_of(EKS, {"eks.karpenter": karpenter}, cluster_role_arn=KARPENTER)
    assert {key: value for key, value in state.items() if key in ("AutoScaling", "ClusterRole")} == wanted
    assert errors(state, EKS) == []
    assert "AutoScaling" not in state_of(SLURM, {"eks.karpenter": True})


def test_a_worker_without_a_partition_is_in_one_of_its_own_name() -> None:
    state = state_of(SLURM, {"groups.2.partition": GONE, "groups.2.name": "big"})
    assert group_of(state, "big")["SlurmConfig"]["PartitionNames"] == ["big"]


@pytest.mark.parametrize(
    ("stack", "group", "edits", "checked"),
    [
        (SLURM, "train", {}, True),
        (SLURM, "train", {"groups.2.deep_health_checks": []}, False),
        (SLURM, "train", {"groups.2.capacity": {"mode": "spot"}}, False),
        (
            SLURM,
            "train",
            {"groups.2.capacity": {"mode": "spot"}, "groups.2.deep_health_checks": ["InstanceStress"]},
            True,
        ),
        (EKS, "spot", {}, False),
        (EKS, "spot", {"groups.1.capacity": GONE}, True),
        (EKS, "spot", {"groups.1.capacity": GONE, "groups.1.count": 0}, True),
        (EKS, "spot", {"groups.1.capacity": GONE, "groups.1.count": 0, "eks.karpenter": True}, False),
    ],
)
def test_nodes_that_come_and_go_are_not_checked_for_an_hour(
    stack: str, group: str, edits: dict[str, Any], checked: bool
) -> None:
    assert ("OnStartDeepHealthChecks" in group_of(state_of(stack, edits), group)) is checked


@pytest.mark.slow
def test_slurm_nodes_mount_by_service_and_eks_nodes_mount_none() -> None:
    state = state_of(SLURM, home=HOME)
    for group in state["InstanceGroups"]:
        kinds = [next(iter(one)) for one in group["InstanceStorageConfigs"]]
        assert kinds == ["EbsVolumeConfig", "FsxLustreConfig", "FsxOpenZfsConfig"]
    assert errors(state, SLURM) == []
    eks = state_of(EKS, lustre=refs_of(SLURM).lustre, home=HOME)
    assert all(len(group["InstanceStorageConfigs"]) == 1 for group in eks["InstanceGroups"])
    assert "FsxLustreConfig" not in json.dumps(state_of(SLURM, lustre=None))


@pytest.mark.slow
def test_a_group_in_another_zone_lies_in_the_subnet_there() -> None:
    there = {"usw2-az3": "subnet-0fedcba9876543210"}
    state = state_of(SLURM, {"groups.1.zone_id": "usw2-az3"}, zone_subnet_ids=there)
    override = {"SecurityGroupIds": ["sg-0123456789abcdef0"], "Subnets": ["subnet-0fedcba9876543210"]}
    assert [group.get("OverrideVpcConfig") for group in state["InstanceGroups"]] == [None, override, None]
    assert state["VpcConfig"]["Subnets"] == ["subnet-0123456789abcdef0"]
    assert errors(state, SLURM) == []


@pytest.mark.slow
def test_a_group_may_have_an_image_a_key_and_patches_of_its_own() -> None:
    wished = {"image_id": "ami-0123456789abcdef0", "auto_patch": "WhenAllIdle", "volume_kms_key": KEY}
    state = state_of(
        SLURM, {f"groups.2.{key}": value for key, value in {**wished, "interface_type": "efa-only"}.items()}
    )
    train = group_of(state, "train")
    assert train["NetworkInterface"] == {"InterfaceType": "efa-only"}
    assert (train["ImageId"], train["AutoPatchConfig"]) == (wished["image_id"], {"PatchingStrategy": "WhenAllIdle"})
    assert [one["EbsVolumeConfig"] for one in train["InstanceStorageConfigs"][:2]] == [
        {"RootVolume": True, "VolumeKmsKeyId": KEY},
        {"VolumeSizeInGB": 500, "VolumeKmsKeyId": KEY},
    ]
    assert errors(state, SLURM) == []


@pytest.mark.slow
def test_slurm_accounts_are_in_users_database_where_one_is_named() -> None:
    secret = "arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-AbCdEf"
    named = {"endpoint": "slurm.abc.us-west-2.rds.amazonaws.com", "secret_arn": secret}
    state = state_of(SLURM, {"slurm.accounting": named})
    found = state["Orchestrator"]["Slurm"]["AccountingDatabase"]
    assert found == {"Endpoint": named["endpoint"], "Port": 3306, "SecretArn": secret}
    assert errors(state, SLURM) == []
    other = state_of(SLURM, {"slurm.accounting": {**named, "name": "slurm_acct_db"}})
    assert other["Orchestrator"]["Slurm"]["AccountingDatabase"]["Name"] == "slurm_acct_db"
    assert "Slurm" not in state_of(EKS, {"slurm.accounting": named})["Orchestrator"]


@pytest.mark.slow
def test_taint_without_value_is_legal_and_stands_without_labels() -> None:
    bare = state_of(EKS, {"groups.1.labels": {}, "groups.1.taints": [{"key": "busy"}]})
    assert group_of(bare, "spot")["KubernetesConfig"] == {"Taints": [{"Key": "busy", "Effect": "NoSchedule"}]}
    assert errors(bare, EKS) == []


def test_tiered_checkpoint_storage_is_for_eks_where_specified() -> None:
    assert "TieredStorageConfig" not in state_of(EKS, {"eks": {}})
    assert "TieredStorageConfig" not in state_of(SLURM, {"eks.tiered_memory_percent": 20})


def test_the_users_tags_and_ours_are_on_the_cluster() -> None:
    tags = {tag["Key"]: tag["Value"] for tag in state_of(SLURM, {"tags": {"team": "llm"}})["Tags"]}
    assert tags == {"lustrain:cluster": "llm-p5", "lustrain:backend": "hyperpod-slurm", "team": "llm"}


def test_what_replaces_a_cluster_is_the_schemas_create_only() -> None:
    version = json.loads((SCHEMAS / "providers" / "us-west-2.json").read_text(encoding="utf-8"))[TYPE]
    schema = json.loads((SCHEMAS / "resources" / f"{version}.json").read_text(encoding="utf-8"))
    paths = {path.removeprefix("/properties/").removeprefix("Orchestrator/") for path in schema["createOnlyProperties"]}
    assert set(create_only(state_of(EKS))) == paths
    assert set(create_only(state_of(SLURM))) == paths - {"Eks"}


def test_change_of_size_replaces_nothing_and_another_subnet_does() -> None:
    assert create_only(state_of(SLURM, {"groups.2.count": 40})) == create_only(state_of(SLURM))
    assert create_only(state_of(SLURM, subnet_id="subnet-0fedcba9876543210")) != create_only(state_of(SLURM))


def test_cluster_on_training_plan_is_protected_spot_is_not() -> None:
    assert protected(spec_of(SLURM, {}))
    assert not protected(spec_of(EKS, {}))


def test_where_nodes_are_found() -> None:
    target = ssm_target("abcdefghijkl").format(group="train", instance_id="i-0123456789abcdef0")
    assert target == "sagemaker-cluster:abcdefghijkl_train-i-0123456789abcdef0"
