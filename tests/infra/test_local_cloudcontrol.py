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
    event = finished(control, control.create_resource(TypeName=TYPE, DesiredState=json.dumps(state)))
    assert event["OperationStatus"] == "SUCCESS", event
    return str(event["Identifier"])


def finished(control: Any, answer: dict[str, Any]) -> dict[str, Any]:
    token = answer["ProgressEvent"]["RequestToken"]
    found: dict[str, Any] = wait_for(
        lambda: control.get_resource_request_status(RequestToken=token)["ProgressEvent"],
        lambda seen: seen["OperationStatus"] != "IN_PROGRESS",
    )
    return found


def properties(control: Any, identifier: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        control.get_resource(TypeName=TYPE, Identifier=identifier)["ResourceDescription"]["Properties"]
    )
    return found


def patch(control: Any, identifier: str, *operations: dict[str, Any]) -> dict[str, Any]:
    answer = control.update_resource(TypeName=TYPE, Identifier=identifier, PatchDocument=json.dumps(operations))
    return finished(control, answer)


def test_a_created_cluster_is_in_progress_then_there_with_its_model_and_the_read_only_properties(
    aws: LocalAws, control: Any, state: dict[str, Any]
) -> None:
    mine = {**state, "ClusterName": "progress"}
    answer = control.create_resource(TypeName=TYPE, DesiredState=json.dumps(mine))
    assert answer["ProgressEvent"]["OperationStatus"] == "IN_PROGRESS"
    event = finished(control, answer)
    assert event["OperationStatus"] == "SUCCESS"
    found = properties(control, event["Identifier"])
    assert found["ClusterArn"] == event["Identifier"]
    assert found["InstanceGroups"][1].pop("CurrentCount") == 4
    assert found["InstanceGroups"][0].pop("CurrentCount") == 1
    assert {name: found[name] for name in mine} == mine
    known = client(aws, "sagemaker").describe_cluster(ClusterName="progress")
    assert known["ClusterArn"] == event["Identifier"]
    listed = [one["Identifier"] for one in control.list_resources(TypeName=TYPE)["ResourceDescriptions"]]
    assert event["Identifier"] in listed
    assert (
        finished(control, control.delete_resource(TypeName=TYPE, Identifier=event["Identifier"]))["OperationStatus"]
        == "SUCCESS"
    )
    assert (
        refusal(control.get_resource, TypeName=TYPE, Identifier=event["Identifier"])[0] == "ResourceNotFoundException"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"NodeRecovry": "Automatic"}, "#: extraneous key [NodeRecovry] is not permitted"),
        ({"NodeRecovery": "Sometimes"}, "#/NodeRecovery: Sometimes is not a valid enum value"),
        ({"VpcConfig": {"Subnets": ["subnet-1"]}}, "#/VpcConfig: required key [SecurityGroupIds] not found"),
        ({"InstanceGroups": []}, "#/InstanceGroups: failed validation constraint for keyword [minItems]"),
        ({"ClusterName": "no_underscore"}, "does not match pattern"),
        ({"ClusterArn": "arn:aws:sagemaker:us-west-2:123456789012:cluster/0123456789ab"}, "readOnlyProperties"),
    ],
)
def test_a_model_that_breaks_the_schema_is_refused_at_once(
    control: Any, state: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    code, message = refusal(control.create_resource, TypeName=TYPE, DesiredState=json.dumps({**state, **changes}))
    assert (code, said in message) == ("ValidationException", True), message


def test_what_the_service_refuses_fails_the_request(control: Any, state: dict[str, Any], cluster: str) -> None:
    again = finished(control, control.create_resource(TypeName=TYPE, DesiredState=json.dumps(state)))
    assert (again["OperationStatus"], again["ErrorCode"]) == ("FAILED", "AlreadyExists")
    nowhere = {**state, "ClusterName": "nowhere", "VpcConfig": {**state["VpcConfig"], "Subnets": ["subnet-1"]}}
    wrong = finished(control, control.create_resource(TypeName=TYPE, DesiredState=json.dumps(nowhere)))
    assert (wrong["OperationStatus"], wrong["ErrorCode"]) == ("FAILED", "InvalidRequest")
    assert "subnet-1" in wrong["StatusMessage"]


def test_a_patch_scales_a_group_and_retags(control: Any, cluster: str) -> None:
    event = patch(
        control,
        cluster,
        {"op": "replace", "path": "/InstanceGroups/1/InstanceCount", "value": 6},
        {"op": "replace", "path": "/Tags/0/Value", "value": "other"},
    )
    assert event["OperationStatus"] == "SUCCESS", event
    found = properties(control, cluster)
    assert found["InstanceGroups"][1]["CurrentCount"] == 6
    assert found["Tags"] == [{"Key": "lustrain:cluster", "Value": "other"}]


def test_a_patch_adds_and_removes_a_group(control: Any, cluster: str) -> None:
    login = {**properties(control, cluster)["InstanceGroups"][0], "InstanceGroupName": "login"}
    login["SlurmConfig"] = {"NodeType": "Login"}
    del login["CurrentCount"]
    assert (
        patch(control, cluster, {"op": "add", "path": "/InstanceGroups/2", "value": login})["OperationStatus"]
        == "SUCCESS"
    )
    assert properties(control, cluster)["InstanceGroups"][2]["InstanceGroupName"] == "login"
    assert patch(control, cluster, {"op": "remove", "path": "/InstanceGroups/2"})["OperationStatus"] == "SUCCESS"
    assert len(properties(control, cluster)["InstanceGroups"]) == 2


@pytest.mark.parametrize(
    ("operation", "code", "said"),
    [
        (
            {"op": "replace", "path": "/ClusterName", "value": "other"},
            "NotUpdatableException",
            "[/properties/ClusterName]",
        ),
        ({"op": "replace", "path": "/VpcConfig/Subnets/0", "value": "subnet-2"}, "NotUpdatableException", "VpcConfig"),
        (
            {
                "op": "replace",
                "path": "/Orchestrator",
                "value": {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:1:cluster/a"}},
            },
            "NotUpdatableException",
            "Orchestrator/Eks",
        ),
        ({"op": "replace", "path": "/ClusterStatus", "value": "Failed"}, "ValidationException", "readOnlyProperties"),
        ({"op": "add", "path": "/NodeRecovry", "value": "None"}, "ValidationException", "extraneous key [NodeRecovry]"),
        ({"op": "replace", "path": "/Nothing", "value": "None"}, "ValidationException", "Invalid patch update"),
    ],
)
def test_a_patch_keeps_off_what_cannot_change(
    control: Any, cluster: str, operation: dict[str, Any], code: str, said: str
) -> None:
    document = json.dumps([operation])
    found, message = refusal(control.update_resource, TypeName=TYPE, Identifier=cluster, PatchDocument=document)
    assert (found, said in message) == (code, True), message


def test_the_same_token_acts_once_and_another_request_under_it_is_refused(control: Any, state: dict[str, Any]) -> None:
    request = {"TypeName": TYPE, "DesiredState": json.dumps({**state, "ClusterName": "once"}), "ClientToken": "token-1"}
    first = control.create_resource(**request)["ProgressEvent"]["RequestToken"]
    assert control.create_resource(**request)["ProgressEvent"]["RequestToken"] == first
    other = {**request, "DesiredState": json.dumps({**state, "ClusterName": "twice"})}
    assert refusal(control.create_resource, **other)[0] == "ClientTokenConflictException"


def test_types_are_known_by_their_schema(aws: LocalAws, control: Any) -> None:
    shown = client(aws, "cloudformation").describe_type(Type="RESOURCE", TypeName=TYPE)
    schema = json.loads(shown["Schema"])
    assert schema["typeName"] == TYPE
    assert "/properties/VpcConfig" in schema["createOnlyProperties"]
    assert (
        refusal(control.get_resource, TypeName="AWS::SageMaker::Clutser", Identifier="x")[0] == "TypeNotFoundException"
    )
    assert refusal(control.get_resource, TypeName="AWS::S3::Bucket", Identifier="x")[0] == "UnsupportedActionException"
