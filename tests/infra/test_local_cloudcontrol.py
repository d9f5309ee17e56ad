"""Cloud Control of the embedded AWS: models held against CloudFormation's schema, patches, and what cannot be changed."""

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
ARN = "arn:aws:sagemaker:us-west-2:123456789012:cluster/0123456789ab"
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
    event = created(control, state)
    assert event["OperationStatus"] == "SUCCESS", event
    return str(event["Identifier"])


def finished(control: Any, answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["ProgressEvent"]["OperationStatus"] == "IN_PROGRESS"
    token = answer["ProgressEvent"]["RequestToken"]
    found: dict[str, Any] = wait_for(
        lambda: control.get_resource_request_status(RequestToken=token)["ProgressEvent"],
        lambda seen: seen["OperationStatus"] != "IN_PROGRESS",
    )
    return found


def created(control: Any, state: dict[str, Any]) -> dict[str, Any]:
    return finished(control, control.create_resource(TypeName=TYPE, DesiredState=json.dumps(state)))


def properties(control: Any, identifier: str) -> dict[str, Any]:
    found = control.get_resource(TypeName=TYPE, Identifier=identifier)["ResourceDescription"]
    return dict(json.loads(found["Properties"]))


def test_a_created_cluster_is_there_with_its_model_and_the_read_only_properties_until_it_is_deleted(
    control: Any, state: dict[str, Any]
) -> None:
    mine = {**state, "ClusterName": "progress"}
    event = created(control, mine)
    assert event["OperationStatus"] == "SUCCESS"
    found = properties(control, event["Identifier"])
    assert found["ClusterArn"] == event["Identifier"]
    assert [group.pop("CurrentCount") for group in found["InstanceGroups"]] == [1, 4]
    assert {name: found[name] for name in mine} == mine
    listed = [one["Identifier"] for one in control.list_resources(TypeName=TYPE)["ResourceDescriptions"]]
    assert event["Identifier"] in listed
    gone = finished(control, control.delete_resource(TypeName=TYPE, Identifier=event["Identifier"]))
    assert gone["OperationStatus"] == "SUCCESS"
    missing = refusal(control.get_resource, TypeName=TYPE, Identifier=event["Identifier"])
    assert missing[0] == "ResourceNotFoundException"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"NodeRecovry": "Automatic"}, "#: extraneous key [NodeRecovry] is not permitted"),
        ({"NodeRecovery": "Sometimes"}, "#/NodeRecovery: Sometimes is not a valid enum value"),
        ({"VpcConfig": {"Subnets": ["subnet-1"]}}, "#/VpcConfig: required key [SecurityGroupIds] not found"),
        ({"InstanceGroups": []}, "#/InstanceGroups: failed validation constraint for keyword [minItems]"),
        ({"ClusterName": "no_underscore"}, "does not match pattern"),
        ({"ClusterArn": ARN}, "readOnlyProperties"),
    ],
)
def test_a_model_that_breaks_the_schema_is_refused_at_once(
    control: Any, state: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    code, message = refusal(control.create_resource, TypeName=TYPE, DesiredState=json.dumps({**state, **changes}))
    assert (code, said in message) == ("ValidationException", True), message


def test_what_the_service_refuses_fails_the_request(control: Any, state: dict[str, Any], cluster: str) -> None:
    again = created(control, state)
    assert (again["OperationStatus"], again["ErrorCode"]) == ("FAILED", "AlreadyExists")
    wrong = created(
        control, {**state, "ClusterName": "a", "VpcConfig": {**state["VpcConfig"], "Subnets": ["subnet-1"]}}
    )
    assert (wrong["OperationStatus"], wrong["ErrorCode"]) == ("FAILED", "InvalidRequest")
    assert "subnet-1" in wrong["StatusMessage"]


@pytest.mark.parametrize(
    ("path", "value", "code", "said"),
    [
        ("/ClusterName", "other", "NotUpdatableException", "[/properties/ClusterName]"),
        ("/VpcConfig/Subnets/0", "subnet-2", "NotUpdatableException", "VpcConfig"),
        ("/Orchestrator", OTHER, "NotUpdatableException", "Orchestrator/Eks"),
        ("/ClusterStatus", "Failed", "ValidationException", "readOnlyProperties"),
        ("/NodeRecovry", "None", "ValidationException", "extraneous key [NodeRecovry]"),
        ("/Nothing/0", "None", "ValidationException", "Invalid patch update"),
    ],
)
def test_a_patch_keeps_off_what_cannot_change(
    control: Any, cluster: str, path: str, value: Any, code: str, said: str
) -> None:
    document = json.dumps([{"op": "add" if path == "/NodeRecovry" else "replace", "path": path, "value": value}])
    found, message = refusal(control.update_resource, TypeName=TYPE, Identifier=cluster, PatchDocument=document)
    assert (found, said in message) == (code, True), message


def test_the_same_token_acts_once_and_another_request_under_it_is_refused(control: Any, state: dict[str, Any]) -> None:
    request = {"TypeName": TYPE, "DesiredState": json.dumps({**state, "ClusterName": "once"}), "ClientToken": "token-1"}
    first = control.create_resource(**request)["ProgressEvent"]["RequestToken"]
    assert control.create_resource(**request)["ProgressEvent"]["RequestToken"] == first
    other = {**request, "DesiredState": json.dumps({**state, "ClusterName": "twice"})}
    assert refusal(control.create_resource, **other)[0] == "ClientTokenConflictException"


@pytest.mark.parametrize(
    ("kind", "code"),
    [("AWS::SageMaker::Clutser", "TypeNotFoundException"), ("AWS::S3::Bucket", "UnsupportedActionException")],
)
def test_other_types_are_refused(control: Any, kind: str, code: str) -> None:
    assert refusal(control.get_resource, TypeName=kind, Identifier="x")[0] == code
