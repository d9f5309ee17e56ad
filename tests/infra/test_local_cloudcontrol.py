"""Cloud Control of the embedded AWS: validation against CloudFormation's schema, patches, and fixed properties."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.local.aws import LocalAws
from tests.infra.local_network import Network, client, refusal
from tests.infra.test_local_hyperpod import make_role, put_scripts, slurm_cluster
from tests.processes import wait_for

pytestmark = pytest.mark.slow

TYPE = "AWS::SageMaker::Cluster"
OTHER = {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:1:cluster/a"}}


@pytest.fixture(scope="module")
def control(aws: LocalAws) -> Any:
    return client(aws, "cloudcontrol")


@pytest.fixture(scope="module")
def state(aws: LocalAws, network: Network) -> dict[str, Any]:
    """A desired state that HyperPod accepts, under the name `model`."""
    put_scripts(aws)
    return slurm_cluster("model", network, make_role(aws, "cloudcontrol-node", "sagemaker.amazonaws.com"))


@pytest.fixture(scope="module")
def cluster(control: Any, state: dict[str, Any]) -> str:
    """The identifier of the cluster `model`."""
    event = create_cluster(control, state)
    assert event["OperationStatus"] == "SUCCESS", event
    return str(event["Identifier"])


def wait_for_event(control: Any, response: dict[str, Any]) -> dict[str, Any]:
    assert response["ProgressEvent"]["OperationStatus"] == "IN_PROGRESS"
    token = response["ProgressEvent"]["RequestToken"]
    event: dict[str, Any] = wait_for(
        lambda: control.get_resource_request_status(RequestToken=token)["ProgressEvent"],
        lambda event: event["OperationStatus"] != "IN_PROGRESS",
    )
    return event


def create_cluster(control: Any, state: dict[str, Any]) -> dict[str, Any]:
    return wait_for_event(control, control.create_resource(TypeName=TYPE, DesiredState=json.dumps(state)))


def properties(control: Any, identifier: str) -> dict[str, Any]:
    description = control.get_resource(TypeName=TYPE, Identifier=identifier)["ResourceDescription"]
    return dict(json.loads(description["Properties"]))


def test_cluster_has_its_model_until_it_is_deleted(control: Any, state: dict[str, Any]) -> None:
    desired = {**state, "ClusterName": "progress"}
    event = create_cluster(control, desired)
    assert event["OperationStatus"] == "SUCCESS"
    model = properties(control, event["Identifier"])
    assert model["ClusterArn"] == event["Identifier"]
    assert [group.pop("CurrentCount") for group in model["InstanceGroups"]] == [1, 4]
    assert {name: model[name] for name in desired} == desired
    deletion = wait_for_event(control, control.delete_resource(TypeName=TYPE, Identifier=event["Identifier"]))
    assert deletion["OperationStatus"] == "SUCCESS"
    missing = refusal(control.get_resource, TypeName=TYPE, Identifier=event["Identifier"])
    assert missing[0] == "ResourceNotFoundException"


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"NodeRecovry": "Automatic"}, "NodeRecovry"),
        ({"NodeRecovery": "Sometimes"}, "#/NodeRecovery: "),
        ({"VpcConfig": {"Subnets": ["subnet-1"]}}, "#/VpcConfig: "),
        ({"InstanceGroups": []}, "#/InstanceGroups: "),
        ({"ClusterName": "no_underscore"}, "does not match pattern"),
    ],
)
def test_model_that_violates_schema_is_refused(
    control: Any, state: dict[str, Any], changes: dict[str, Any], message_part: str
) -> None:
    code, message = refusal(control.create_resource, TypeName=TYPE, DesiredState=json.dumps({**state, **changes}))
    assert (code, message_part in message) == ("ValidationException", True), message


def test_service_refusal_fails_the_request(control: Any, state: dict[str, Any], cluster: str) -> None:
    duplicate = create_cluster(control, state)
    assert (duplicate["OperationStatus"], duplicate["ErrorCode"]) == ("FAILED", "AlreadyExists")
    invalid = create_cluster(
        control, {**state, "ClusterName": "a", "VpcConfig": {**state["VpcConfig"], "Subnets": ["subnet-1"]}}
    )
    assert (invalid["OperationStatus"], invalid["ErrorCode"]) == ("FAILED", "InvalidRequest")
    assert "subnet-1" in invalid["StatusMessage"]


@pytest.mark.parametrize(
    ("path", "value", "code", "message_part"),
    [
        ("/ClusterName", "other", "NotUpdatableException", "[/properties/ClusterName]"),
        ("/VpcConfig/Subnets/0", "subnet-2", "NotUpdatableException", "VpcConfig"),
        ("/Orchestrator", OTHER, "NotUpdatableException", "Orchestrator/Eks"),
        ("/NodeRecovry", "None", "ValidationException", "NodeRecovry"),
        ("/Nothing/0", "None", "ValidationException", "Invalid patch update"),
    ],
)
def test_patch_of_fixed_property_is_refused(
    control: Any, cluster: str, path: str, value: Any, code: str, message_part: str
) -> None:
    document = json.dumps([{"op": "add" if path == "/NodeRecovry" else "replace", "path": path, "value": value}])
    refused_code, message = refusal(control.update_resource, TypeName=TYPE, Identifier=cluster, PatchDocument=document)
    assert (refused_code, message_part in message) == (code, True), message


def test_patch_scales_groups_but_changes_no_instance_type(control: Any, state: dict[str, Any]) -> None:
    identifier = create_cluster(control, {**state, "ClusterName": "scaled"})["Identifier"]
    workers = "/InstanceGroups/1"
    target = {"TypeName": TYPE, "Identifier": identifier}

    def patch(*changes: dict[str, Any]) -> dict[str, Any]:
        return wait_for_event(control, control.update_resource(**target, PatchDocument=json.dumps(changes)))

    login = {**state["InstanceGroups"][0], "InstanceGroupName": "login", "SlurmConfig": {"NodeType": "Login"}}
    patch(
        {"op": "replace", "path": f"{workers}/InstanceCount", "value": 6},
        {"op": "add", "path": "/InstanceGroups/-", "value": login},
    )
    groups = properties(control, identifier)["InstanceGroups"]
    counts = {group["InstanceGroupName"]: group["CurrentCount"] for group in groups}
    assert counts == {"controller": 1, "train": 6, "login": 1}
    patch({"op": "remove", "path": "/InstanceGroups/2"})
    assert len(properties(control, identifier)["InstanceGroups"]) == 2
    refused = patch({"op": "replace", "path": f"{workers}/InstanceType", "value": "ml.p5.48xlarge"})
    assert (refused["OperationStatus"], refused["ErrorCode"]) == ("FAILED", "InvalidRequest")


@pytest.mark.parametrize(
    ("kind", "code"),
    [("AWS::SageMaker::Clutser", "TypeNotFoundException"), ("AWS::S3::Bucket", "UnsupportedActionException")],
)
def test_other_resource_types_are_refused(control: Any, kind: str, code: str) -> None:
    assert refusal(control.get_resource, TypeName=kind, Identifier="x")[0] == code
