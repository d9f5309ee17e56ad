"""HyperPod of the embedded AWS stores every field and validates like the service."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from infra.local.aws import LocalAws
from tests.infra.local_network import ACCOUNT, Network, client, refusal
from tests.processes import wait_for

pytestmark = pytest.mark.slow

SCRIPTS = "s3://sagemaker-lustrain-lifecycle/lifecycle/0123456789ab"


@pytest.fixture(scope="module")
def sagemaker(aws: LocalAws) -> Any:
    return client(aws, "sagemaker")


@pytest.fixture(scope="module")
def role(aws: LocalAws) -> str:
    return make_role(aws, "hyperpod-node", "sagemaker.amazonaws.com")


@pytest.fixture(scope="module")
def request_of(aws: LocalAws, network: Network, role: str) -> Callable[..., dict[str, Any]]:
    """A function that returns a valid request for a Slurm cluster, with a new name unless `ClusterName` is set."""
    put_scripts(aws)
    count = 0

    def make(**changes: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        request = slurm_cluster(f"cluster-{count}", network, role) | changes
        return {name: value for name, value in request.items() if value is not None}

    return make


def put_scripts(aws: LocalAws) -> None:
    """Upload the life-cycle scripts that `slurm_cluster` names; a second call changes nothing."""
    s3 = client(aws, "s3")
    bucket, _, folder = SCRIPTS.removeprefix("s3://").partition("/")
    if bucket not in [bucket_description["Name"] for bucket_description in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_object(Bucket=bucket, Key=f"{folder}/on_init.sh", Body=b"#!/bin/sh\n")


def make_role(aws: LocalAws, name: str, trusted: str) -> str:
    statement = {"Effect": "Allow", "Principal": {"Service": trusted}, "Action": "sts:AssumeRole"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    return str(client(aws, "iam").create_role(RoleName=name, AssumeRolePolicyDocument=document)["Role"]["Arn"])


def slurm_cluster(name: str, network: Network, role: str) -> dict[str, Any]:
    lustre = {"DnsName": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com", "MountName": "abcdefgh"}
    common = {
        "ExecutionRole": role,
        "LifeCycleConfig": {"SourceS3Uri": SCRIPTS, "OnInitComplete": "on_init.sh"},
        "InstanceStorageConfigs": [{"EbsVolumeConfig": {"VolumeSizeInGB": 500}}, {"FsxLustreConfig": lustre}],
    }
    controller = {
        "InstanceGroupName": "controller",
        "InstanceType": "ml.c5.2xlarge",
        "InstanceCount": 1,
        "ThreadsPerCore": 2,
        "SlurmConfig": {"NodeType": "Controller"},
    }
    workers = {
        "InstanceGroupName": "train",
        "InstanceType": "ml.p5en.48xlarge",
        "InstanceCount": 4,
        "MinInstanceCount": 2,
        "ThreadsPerCore": 1,
        "SlurmConfig": {"NodeType": "Compute", "PartitionNames": ["train"]},
        "OnStartDeepHealthChecks": ["InstanceStress", "InstanceConnectivity"],
    }
    return {
        "ClusterName": name,
        "NodeProvisioningMode": "Continuous",
        "NodeRecovery": "Automatic",
        "Orchestrator": {"Slurm": {"SlurmConfigStrategy": "Managed"}},
        "VpcConfig": {"SecurityGroupIds": [network.group], "Subnets": [network.subnet]},
        "Tags": [{"Key": "lustrain:cluster", "Value": name}],
        "InstanceGroups": [{**controller, **common}, {**workers, **common}],
    }


def workers_with(request: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The request with members of its second group replaced; None removes a member."""
    controller, workers = request["InstanceGroups"]
    changed = {name: value for name, value in {**workers, **changes}.items() if value is not None}
    return {**request, "InstanceGroups": [controller, changed]}


def volume(**members: Any) -> dict[str, Any]:
    return {"InstanceStorageConfigs": [{"EbsVolumeConfig": members}]}


def in_service(sagemaker: Any, name: str) -> dict[str, Any]:
    description: dict[str, Any] = wait_for(
        lambda: sagemaker.describe_cluster(ClusterName=name),
        lambda description: description["ClusterStatus"] == "InService",
    )
    return description


def test_cluster_keeps_every_field_until_it_is_deleted(sagemaker: Any, request_of: Any) -> None:
    request = request_of()
    arn, name = sagemaker.create_cluster(**request)["ClusterArn"], request["ClusterName"]
    description = in_service(sagemaker, arn)
    for key in ("NodeProvisioningMode", "NodeRecovery", "Orchestrator", "VpcConfig"):
        assert description[key] == request[key]
    workers, requested = description["InstanceGroups"][1], request["InstanceGroups"][1]
    for key in requested.keys() - {"InstanceCount", "MinInstanceCount"}:
        assert workers[key] == requested[key]
    assert (workers["CurrentCount"], workers["TargetCount"], workers["MinCount"]) == (4, 4, 2)
    sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "team", "Value": "ml"}])
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == [*request["Tags"], {"Key": "team", "Value": "ml"}]
    assert refusal(sagemaker.create_cluster, **request)[0] == "ResourceInUse"
    sagemaker.delete_cluster(ClusterName=name)
    assert refusal(sagemaker.describe_cluster, ClusterName=name)[0] == "ResourceNotFound"
    assert name not in [summary["ClusterName"] for summary in sagemaker.list_clusters()["ClusterSummaries"]]


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"ClusterName": "ends-with-"}, "'clusterName' failed to satisfy constraint"),
        ({"Orchestrator": {}}, "exactly one of Eks and Slurm"),
        ({"Orchestrator": None}, "not Slurm"),
        ({"VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}}, "subnet ID 'subnet-1' does not exist"),
        ({"TieredStorageConfig": {"Mode": "Enable"}}, "orchestrator is EKS only"),
        ({"NodeRecovery": "Sometimes"}, "enum value set: [Automatic, None]"),
    ],
)
def test_invalid_cluster_is_refused(
    sagemaker: Any, request_of: Any, changes: dict[str, Any], message_part: str
) -> None:
    code, message = refusal(sagemaker.create_cluster, **request_of(**changes))
    assert (code, message_part in message) == ("ValidationException", True), message


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"InstanceType": "ml.p7.48xlarge"}, "enum value set"),
        ({"InstanceType": None}, "exactly one of InstanceType and InstanceRequirements"),
        ({"SlurmConfig": None}, "needs a SlurmConfig"),
        ({"SlurmConfig": {"NodeType": "Controller"}}, "exactly one instance group of node type Controller"),
        ({"SlurmConfig": {"NodeType": "Login", "PartitionNames": ["dev"]}}, "node type Compute only"),
        ({"KubernetesConfig": {"Labels": {"a": "b"}}}, "not EKS"),
        ({"CapacityRequirements": {"Spot": {}}}, "needs orchestrator EKS"),
        ({"ExecutionRole": f"arn:aws:iam::{ACCOUNT}:role/nobody"}, "Could not assume role"),
        ({"LifeCycleConfig": {"SourceS3Uri": "s3://mine/a", "OnCreate": "x.sh"}}, "start with 's3://sagemaker-'"),
        ({"LifeCycleConfig": {"SourceS3Uri": SCRIPTS, "OnCreate": "missing.sh"}}, "missing.sh does not exist"),
        ({"LifeCycleConfig": {"SourceS3Uri": SCRIPTS}}, "exactly one of OnCreate and OnInitComplete"),
        (volume(VolumeSizeInGB=9, VolumeKmsKeyId="alias/none"), "does not exist"),
    ],
)
def test_invalid_instance_group_is_refused(
    sagemaker: Any, request_of: Any, changes: dict[str, Any], message_part: str
) -> None:
    code, message = refusal(sagemaker.create_cluster, **workers_with(request_of(), **changes))
    assert (code, message_part in message) == ("ValidationException", True), message


def test_keys_image_and_accounting_are_described(aws: LocalAws, sagemaker: Any, request_of: Any) -> None:
    key = client(aws, "kms").create_key()["KeyMetadata"]["Arn"]
    secondary = {"VolumeSizeInGB": 500, "VolumeKmsKeyId": key}
    volumes = [{"EbsVolumeConfig": {"RootVolume": True, "VolumeKmsKeyId": key}}, {"EbsVolumeConfig": secondary}]
    database = {"Endpoint": "db.example.com", "SecretArn": f"arn:aws:secretsmanager:us-west-2:{ACCOUNT}:secret:s-1"}
    slurm = {"SlurmConfigStrategy": "Managed", "AccountingDatabase": database}
    image, patches = "ami-0123456789abcdef0", {"PatchingStrategy": "WhenIdle"}
    members = {"InstanceStorageConfigs": volumes, "ImageId": image, "AutoPatchConfig": patches}
    request = workers_with(request_of(Orchestrator={"Slurm": slurm}), **members)
    sagemaker.create_cluster(**request)
    description = in_service(sagemaker, request["ClusterName"])
    workers = description["InstanceGroups"][1]
    assert description["Orchestrator"] == {"Slurm": slurm}
    assert (workers["CurrentImageId"], workers["AutoPatchConfig"]) == (image, patches)
    assert workers["InstanceStorageConfigs"] == volumes


def test_role_of_another_service_is_refused(aws: LocalAws, sagemaker: Any, request_of: Any) -> None:
    foreign = workers_with(request_of(), ExecutionRole=make_role(aws, "foreign", "ec2.amazonaws.com"))
    assert "Could not assume role" in refusal(sagemaker.create_cluster, **foreign)[1]
