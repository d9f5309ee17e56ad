"""HyperPod of the embedded AWS keeps every field, makes what the service makes and refuses what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.sagemaker.models import sagemaker_backends

from infra.local.additions.hyperpod.clusters import Cluster, Node
from infra.local.additions.hyperpod.nodes import fail_node
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
    """A request for a Slurm cluster that the service accepts; each call under a name of its own unless `ClusterName` says."""
    put_scripts(aws)
    count = 0

    def make(**changes: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        request = slurm_cluster(f"cluster-{count}", network, role) | changes
        return {name: value for name, value in request.items() if value is not None}

    return make


def put_scripts(aws: LocalAws) -> None:
    """The life-cycle scripts that `slurm_cluster` names; a second time changes nothing."""
    s3 = client(aws, "s3")
    bucket, _, folder = SCRIPTS.removeprefix("s3://").partition("/")
    if bucket not in [one["Name"] for one in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    s3.put_object(Bucket=bucket, Key=f"{folder}/on_init.sh", Body=b"#!/bin/sh\n")


def make_role(aws: LocalAws, name: str, trusted: str) -> str:
    statement = {"Effect": "Allow", "Principal": {"Service": trusted}, "Action": "sts:AssumeRole"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    return str(client(aws, "iam").create_role(RoleName=name, AssumeRolePolicyDocument=document)["Role"]["Arn"])


def make_queue(sqs: Any, name: str) -> tuple[str, str]:
    """The URL and the ARN of a queue that EventBridge may write to."""
    url = str(sqs.create_queue(QueueName=name)["QueueUrl"])
    arn = str(sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"])
    principal = {"Service": "events.amazonaws.com"}
    statement = {"Effect": "Allow", "Principal": principal, "Action": "sqs:SendMessage", "Resource": arn}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": policy})
    return url, arn


def slurm_cluster(name: str, network: Network, role: str) -> dict[str, Any]:
    common = {
        "ExecutionRole": role,
        "LifeCycleConfig": {"SourceS3Uri": SCRIPTS, "OnInitComplete": "on_init.sh"},
        "InstanceStorageConfigs": [
            {"EbsVolumeConfig": {"VolumeSizeInGB": 500}},
            {
                "FsxLustreConfig": {
                    "DnsName": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
                    "MountName": "abcdefgh",
                }
            },
        ],
    }
    controller = {
        "InstanceGroupName": "controller",
        "InstanceType": "ml.c5.2xlarge",
        "InstanceCount": 1,
        "ThreadsPerCore": 2,
    }
    workers = {
        "InstanceGroupName": "train",
        "InstanceType": "ml.p5en.48xlarge",
        "InstanceCount": 4,
        "MinInstanceCount": 2,
    }
    return {
        "ClusterName": name,
        "NodeProvisioningMode": "Continuous",
        "NodeRecovery": "Automatic",
        "Orchestrator": {"Slurm": {"SlurmConfigStrategy": "Managed"}},
        "VpcConfig": {"SecurityGroupIds": [network.group], "Subnets": [network.subnet]},
        "Tags": [{"Key": "lustrain:cluster", "Value": name}],
        "InstanceGroups": [
            {**controller, **common, "SlurmConfig": {"NodeType": "Controller"}},
            {
                **workers,
                **common,
                "ThreadsPerCore": 1,
                "SlurmConfig": {"NodeType": "Compute", "PartitionNames": ["train"]},
                "OnStartDeepHealthChecks": ["InstanceStress", "InstanceConnectivity"],
            },
        ],
    }


def workers_with(request: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The request with members of its second group replaced; None takes one away."""
    controller, workers = request["InstanceGroups"]
    changed = {name: value for name, value in {**workers, **changes}.items() if value is not None}
    return {**request, "InstanceGroups": [controller, changed]}


def in_service(sagemaker: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(
        lambda: sagemaker.describe_cluster(ClusterName=name), lambda seen: seen["ClusterStatus"] == "InService"
    )
    return found


def test_a_cluster_is_created_and_every_field_comes_back(sagemaker: Any, request_of: Any) -> None:
    request = request_of()
    arn = sagemaker.create_cluster(**request)["ClusterArn"]
    assert sagemaker.describe_cluster(ClusterName=arn)["ClusterStatus"] == "Creating"
    found = in_service(sagemaker, request["ClusterName"])
    for name in ("NodeProvisioningMode", "NodeRecovery", "Orchestrator", "VpcConfig"):
        assert found[name] == request[name]
    workers = found["InstanceGroups"][1]
    asked = request["InstanceGroups"][1]
    for name in (
        "SlurmConfig",
        "OnStartDeepHealthChecks",
        "LifeCycleConfig",
        "InstanceStorageConfigs",
        "ThreadsPerCore",
    ):
        assert workers[name] == asked[name]
    assert (workers["CurrentCount"], workers["TargetCount"], workers["MinCount"]) == (4, 4, 2)
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == request["Tags"]
    sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "team", "Value": "ml"}])
    assert {"Key": "team", "Value": "ml"} in sagemaker.list_tags(ResourceArn=arn)["Tags"]
    assert refusal(sagemaker.create_cluster, **request)[0] == "ResourceInUse"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ClusterName": "ends-with-"}, "'clusterName' failed to satisfy constraint"),
        ({"Orchestrator": {}}, "exactly one of Eks and Slurm"),
        ({"Orchestrator": None}, "not Slurm"),
        ({"InstanceGroups": None, "NodeProvisioningMode": None}, "At least one instance group"),
        ({"VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}}, "subnet ID 'subnet-1' does not exist"),
        ({"TieredStorageConfig": {"Mode": "Enable"}}, "orchestrator is EKS only"),
        ({"NodeRecovery": "Sometimes"}, "enum value set: [Automatic, None]"),
    ],
)
def test_a_wrong_cluster_is_refused(sagemaker: Any, request_of: Any, changes: dict[str, Any], said: str) -> None:
    code, message = refusal(sagemaker.create_cluster, **request_of(**changes))
    assert (code, said in message) == ("ValidationException", True), message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"InstanceType": "ml.p7.48xlarge"}, "enum value set"),
        ({"InstanceType": None}, "exactly one of InstanceType and InstanceRequirements"),
        ({"InstanceGroupName": "controller"}, "is not unique"),
        ({"MinInstanceCount": 5}, "more than its InstanceCount 4"),
        ({"SlurmConfig": None}, "needs a SlurmConfig"),
        ({"SlurmConfig": {"NodeType": "Controller"}}, "exactly one instance group of node type Controller"),
        ({"SlurmConfig": {"NodeType": "Login", "PartitionNames": ["dev"]}}, "node type Compute only"),
        ({"KubernetesConfig": {"Labels": {"a": "b"}}}, "not EKS"),
        ({"CapacityRequirements": {"Spot": {}}}, "needs orchestrator EKS"),
        ({"ExecutionRole": f"arn:aws:iam::{ACCOUNT}:role/nobody"}, "Could not assume role"),
        (
            {"LifeCycleConfig": {"SourceS3Uri": "s3://mine/lifecycle", "OnCreate": "x.sh"}},
            "does not start with 's3://sagemaker-'",
        ),
        ({"LifeCycleConfig": {"SourceS3Uri": SCRIPTS, "OnCreate": "missing.sh"}}, "missing.sh does not exist"),
        ({"LifeCycleConfig": {"SourceS3Uri": SCRIPTS}}, "exactly one of OnCreate and OnInitComplete"),
        (
            {"InstanceStorageConfigs": [{"EbsVolumeConfig": {"RootVolume": True, "VolumeSizeInGB": 9}}]},
            "VolumeKmsKeyId",
        ),
        ({"TrainingPlanArn": f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-plan/x"}, "not in us-west-2"),
        (
            {"InstanceStorageConfigs": [{"EbsVolumeConfig": {"VolumeSizeInGB": 9, "VolumeKmsKeyId": "alias/none"}}]},
            "does not exist",
        ),
        ({"AutoPatchConfig": {"PatchingStrategy": "DrainFirst"}}, "needs orchestrator EKS"),
        (
            {"AutoPatchConfig": {"PatchingStrategy": "WhenIdle", "DrainPolicy": {"OnDrainTimeout": "Skip"}}},
            "for DrainFirst only",
        ),
    ],
)
def test_a_wrong_group_is_refused(sagemaker: Any, request_of: Any, changes: dict[str, Any], said: str) -> None:
    code, message = refusal(sagemaker.create_cluster, **workers_with(request_of(), **changes))
    assert (code, said in message) == ("ValidationException", True), message


def test_image_key_patches_and_accounting_come_back_and_what_cannot_change_does_not(
    aws: LocalAws, sagemaker: Any, request_of: Any
) -> None:
    key, other = (client(aws, "kms").create_key()["KeyMetadata"]["Arn"] for _ in range(2))

    def volumes(arn: str) -> list[dict[str, Any]]:
        secondary = {"VolumeSizeInGB": 500, "VolumeKmsKeyId": arn}
        return [{"EbsVolumeConfig": {"RootVolume": True, "VolumeKmsKeyId": arn}}, {"EbsVolumeConfig": secondary}]

    database = {"Endpoint": "db.example.com", "SecretArn": f"arn:aws:secretsmanager:us-west-2:{ACCOUNT}:secret:s-1"}
    slurm = {"SlurmConfigStrategy": "Managed", "AccountingDatabase": database}
    image, patches = "ami-0123456789abcdef0", {"PatchingStrategy": "WhenIdle"}
    request = workers_with(
        request_of(Orchestrator={"Slurm": slurm}),
        InstanceStorageConfigs=volumes(key),
        ImageId=image,
        AutoPatchConfig=patches,
    )
    sagemaker.create_cluster(**request)
    found = in_service(sagemaker, request["ClusterName"])
    workers = found["InstanceGroups"][1]
    assert found["Orchestrator"] == {"Slurm": slurm}
    assert (workers["CurrentImageId"], workers["AutoPatchConfig"]) == (image, patches)
    assert workers["InstanceStorageConfigs"] == volumes(key)
    changed = {**request["InstanceGroups"][1], "InstanceStorageConfigs": volumes(other)}
    for wish, said in (
        ({"InstanceGroups": [changed]}, "KMS keys of instance group train cannot be changed"),
        ({"Orchestrator": {"Slurm": {"SlurmConfigStrategy": "Managed"}}}, "cannot go back"),
    ):
        assert said in refusal(sagemaker.update_cluster, ClusterName=request["ClusterName"], **wish)[1]
    without = request_of(NodeProvisioningMode=None)
    assert (
        "need NodeProvisioningMode Continuous"
        in refusal(sagemaker.create_cluster, **workers_with(without, InstanceStorageConfigs=volumes(key)))[1]
    )


def test_a_role_of_another_service_cannot_run_nodes(aws: LocalAws, sagemaker: Any, request_of: Any) -> None:
    foreign = make_role(aws, "foreign", "ec2.amazonaws.com")
    assert (
        "Could not assume role"
        in refusal(sagemaker.create_cluster, **workers_with(request_of(), ExecutionRole=foreign))[1]
    )


def test_an_update_scales_adds_and_deletes_groups_but_changes_no_type(sagemaker: Any, request_of: Any) -> None:
    request = request_of()
    name = request["ClusterName"]
    sagemaker.create_cluster(**request)
    in_service(sagemaker, name)
    (controller, workers) = request["InstanceGroups"]
    login = {**controller, "InstanceGroupName": "login", "SlurmConfig": {"NodeType": "Login"}}
    sagemaker.update_cluster(ClusterName=name, InstanceGroups=[{**workers, "InstanceCount": 6}, login])
    found = {
        group["InstanceGroupName"]: group["CurrentCount"] for group in in_service(sagemaker, name)["InstanceGroups"]
    }
    assert found == {"controller": 1, "train": 6, "login": 1}
    sagemaker.update_cluster(ClusterName=name, InstanceGroupsToDelete=["login"], NodeRecovery="None")
    after = in_service(sagemaker, name)
    assert [group["InstanceGroupName"] for group in after["InstanceGroups"]] == ["controller", "train"]
    assert after["NodeRecovery"] == "None"
    other = [{**workers, "InstanceType": "ml.p5.48xlarge"}]
    assert "cannot be changed" in refusal(sagemaker.update_cluster, ClusterName=name, InstanceGroups=other)[1]


def test_without_continuous_provisioning_an_update_waits_for_the_one_before(sagemaker: Any, request_of: Any) -> None:
    request = request_of(NodeProvisioningMode=None)
    name = request["ClusterName"]
    sagemaker.create_cluster(**request)
    assert refusal(sagemaker.update_cluster, ClusterName=name, NodeRecovery="None")[0] == "ConflictException"
    in_service(sagemaker, name)
    sagemaker.update_cluster(ClusterName=name, NodeRecovery="None")
    assert sagemaker.describe_cluster(ClusterName=name)["ClusterStatus"] == "Updating"
    assert in_service(sagemaker, name)["NodeRecovery"] == "None"


def test_nodes_are_replaced_and_deleted_by_id_and_the_controller_stays(sagemaker: Any, request_of: Any) -> None:
    request = request_of()
    name = request["ClusterName"]
    sagemaker.create_cluster(**request)
    nodes = sagemaker.list_cluster_nodes(ClusterName=name, IncludeNodeLogicalIds=True)["ClusterNodeSummaries"]
    controller, first, second = (node["InstanceId"] for node in nodes[:3])
    done = sagemaker.batch_replace_cluster_nodes(ClusterName=name, NodeIds=[first, controller, "i-00000000"])
    assert done["Successful"] == [first]
    assert {one["NodeId"]: one["ErrorCode"] for one in done["Failed"]} == {
        controller: "InvalidInstanceStatus",
        "i-00000000": "InstanceIdNotFound",
    }
    detail = sagemaker.describe_cluster_node(ClusterName=name, NodeLogicalId=nodes[1]["NodeLogicalId"])["NodeDetails"]
    assert detail["InstanceId"] != first
    assert detail["Placement"]["AvailabilityZoneId"] == "usw2-az2"
    done = sagemaker.batch_delete_cluster_nodes(ClusterName=name, NodeIds=[second, controller])
    assert (done["Successful"], done["Failed"][0]["NodeId"]) == ([second], controller)
    assert in_service(sagemaker, name)["InstanceGroups"][1]["TargetCount"] == 3
    descriptions = [event["Description"] for event in sagemaker.list_cluster_events(ClusterName=name)["Events"]]
    assert descriptions[0] == f"Instance {second} has been deleted"
    assert f"Instance {first} is being replaced" in descriptions


def test_a_replacement_reaches_the_queue_of_an_event_rule(aws: LocalAws, sagemaker: Any, request_of: Any) -> None:
    events, sqs = client(aws, "events"), client(aws, "sqs")
    queue, arn = make_queue(sqs, "interruptions")
    pattern = {"source": ["aws.sagemaker"], "detail-type": ["SageMaker HyperPod Cluster Event"]}
    events.put_rule(Name="nodes", EventPattern=json.dumps(pattern))
    events.put_targets(Rule="nodes", Targets=[{"Id": "queue", "Arn": arn}])
    request = request_of()
    sagemaker.create_cluster(**request)
    node = sagemaker.list_cluster_nodes(ClusterName=request["ClusterName"])["ClusterNodeSummaries"][1]["InstanceId"]
    sagemaker.batch_replace_cluster_nodes(ClusterName=request["ClusterName"], NodeIds=[node])
    message = json.loads(sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=1)["Messages"][0]["Body"])
    assert message["detail"]["EventDetails"]["InstanceId"] == node
    assert message["detail"]["EventDetails"]["ClusterName"] == request["ClusterName"]
    assert message["detail-type"] == "SageMaker HyperPod Cluster Event"


def test_a_deleted_cluster_is_not_found(sagemaker: Any, request_of: Any) -> None:
    request = request_of()
    sagemaker.create_cluster(**request)
    sagemaker.delete_cluster(ClusterName=request["ClusterName"])
    assert refusal(sagemaker.describe_cluster, ClusterName=request["ClusterName"])[0] == "ResourceNotFound"
    assert request["ClusterName"] not in [one["ClusterName"] for one in sagemaker.list_clusters()["ClusterSummaries"]]


def test_a_faulty_node_is_reported_and_replaced_only_where_recovery_is_automatic() -> None:
    account, region = ACCOUNT, "us-west-2"
    with mock_aws():
        events, sqs = boto3.client("events", region), boto3.client("sqs", region)
        queue, arn = make_queue(sqs, "health")
        pattern = {"source": ["aws.sagemaker"], "detail-type": ["SageMaker HyperPod Cluster Node Health Event"]}
        events.put_rule(Name="health", EventPattern=json.dumps(pattern))
        events.put_targets(Rule="health", Targets=[{"Id": "queue", "Arn": arn}])
        for recovery, heard in (("Automatic", ["Unhealthy", "Healthy"]), ("None", ["Unhealthy"])):
            node = Node("train", "ml.p5.48xlarge")
            cluster_arn = f"arn:aws:sagemaker:{region}:{account}:cluster/{recovery.lower():0<12}"
            spec = {"ClusterName": recovery, "NodeRecovery": recovery, "InstanceGroups": []}
            cluster = Cluster(account, region, cluster_arn, spec, [], nodes=[node])
            backend: Any = sagemaker_backends[account][region]
            backend.clusters[cluster.id] = cluster
            before = node.id
            after = fail_node(account, region, recovery, before)
            messages = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)["Messages"]
            told = [json.loads(message["Body"])["detail"] for message in messages]
            assert [one["HealthSummary"]["HealthStatus"] for one in told] == heard
            assert told[0]["InstanceId"] == before
            assert (after != before, node.status) == (
                (True, "Running") if recovery == "Automatic" else (False, "Failure")
            )
            for message in messages:
                sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
