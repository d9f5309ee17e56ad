"""Budgets and S3 of the embedded AWS, and its errors for missing actions and internal failures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore import xform_name
from botocore.exceptions import ClientError
from flask import Response
from moto.sts.responses import TokenResponse
from werkzeug.test import Client

from infra.local.aws import LocalAws
from infra.local.errors import application
from tests.infra.local_network import ACCOUNT, client, refusal

pytestmark = pytest.mark.slow

TLS_ONLY = {
    "Effect": "Deny",
    "Principal": "*",
    "Action": "s3:*",
    "Resource": ["arn:aws:s3:::kept", "arn:aws:s3:::kept/*"],
    "Condition": {"Bool": {"aws:SecureTransport": "false"}},
}


@pytest.fixture(scope="module")
def s3(aws: LocalAws) -> Any:
    return client(aws, "s3", "us-east-1")


def test_budget_changes_and_keeps_subscribers_and_tags(aws: LocalAws) -> None:
    budgets, tags = client(aws, "budgets"), [{"Key": "team", "Value": "ml"}]
    notice = {"NotificationType": "ACTUAL", "ComparisonOperator": "GREATER_THAN", "Threshold": 80.0}
    mail = [{"SubscriptionType": "EMAIL", "Address": "ops@example.com"}]
    budget = {"BudgetName": "llm", "BudgetType": "COST", "TimeUnit": "MONTHLY"}
    budgets.create_budget(
        AccountId=ACCOUNT,
        Budget={**budget, "BudgetLimit": {"Amount": "100", "Unit": "USD"}},
        NotificationsWithSubscribers=[{"Notification": notice, "Subscribers": mail}],
        ResourceTags=tags,
    )
    more = {**budget, "BudgetLimit": {"Amount": "200", "Unit": "USD"}}
    budgets.update_budget(AccountId=ACCOUNT, NewBudget=more)
    ours = {"AccountId": ACCOUNT, "BudgetName": "llm"}
    assert budgets.describe_budget(**ours)["Budget"]["BudgetLimit"]["Amount"] == "200"
    assert budgets.describe_subscribers_for_notification(**ours, Notification=notice)["Subscribers"] == mail
    arn = f"arn:aws:budgets::{ACCOUNT}:budget/llm"
    assert budgets.list_tags_for_resource(ResourceARN=arn)["ResourceTags"] == tags
    missing = {**more, "BudgetName": "none"}
    assert refusal(budgets.update_budget, AccountId=ACCOUNT, NewBudget=missing)[0] == "NotFoundException"


def test_role_with_a_missing_boundary_is_refused(aws: LocalAws) -> None:
    iam = client(aws, "iam")
    kept = "arn:aws:iam::aws:policy/PowerUserAccess"
    request = {
        "RoleName": "bounded",
        "AssumeRolePolicyDocument": json.dumps({"Version": "2012-10-17", "Statement": []}),
    }
    missing = f"arn:aws:iam::{ACCOUNT}:policy/nobody"
    assert refusal(iam.create_role, **request, PermissionsBoundary=missing)[0] == "NoSuchEntity"
    iam.create_role(**request, PermissionsBoundary=kept)
    assert iam.get_role(RoleName="bounded")["Role"]["PermissionsBoundary"]["PermissionsBoundaryArn"] == kept
    change = {"RoleName": "bounded", "PermissionsBoundary": missing}
    assert refusal(iam.put_role_permissions_boundary, **change)[0] == "NoSuchEntity"


def test_bucket_policy_conditions_are_evaluated(s3: Any) -> None:
    s3.create_bucket(Bucket="kept")
    s3.put_bucket_policy(Bucket="kept", Policy=json.dumps({"Version": "2012-10-17", "Statement": [TLS_ONLY]}))
    s3.put_object(Bucket="kept", Key="a", Body=b"x")
    assert s3.get_object(Bucket="kept", Key="a")["Body"].read() == b"x"

    def only(account: str) -> str:
        other = {
            "StringNotEquals": {"aws:PrincipalAccount": account},
            "Bool": {"aws:PrincipalIsAWSService": "false"},
        }
        return json.dumps({"Version": "2012-10-17", "Statement": [{**TLS_ONLY, "Condition": other}]})

    s3.put_bucket_policy(Bucket="kept", Policy=only(ACCOUNT))
    s3.put_object(Bucket="kept", Key="a", Body=b"x")
    s3.put_bucket_policy(Bucket="kept", Policy=only("210987654321"))
    assert refusal(s3.put_object, Bucket="kept", Key="a", Body=b"x")[0] == "403"
    always = {name: value for name, value in TLS_ONLY.items() if name != "Condition"}
    s3.put_bucket_policy(Bucket="kept", Policy=json.dumps({"Version": "2012-10-17", "Statement": [always]}))
    assert refusal(s3.put_object, Bucket="kept", Key="a", Body=b"x")[0] == "403"


def test_workspace_takes_one_alert_manager_of_the_right_form(aws: LocalAws) -> None:
    amp = client(aws, "amp")
    workspace = amp.create_workspace(alias="llm")["workspaceId"]
    definition = b"alertmanager_config: |\n  route: {receiver: topic}\n"
    assert refusal(amp.describe_alert_manager_definition, workspaceId=workspace)[0] == "ResourceNotFoundException"
    bare = {"workspaceId": workspace, "data": b"route: {receiver: topic}\n"}
    assert refusal(amp.create_alert_manager_definition, **bare)[0] == "ValidationException"
    amp.create_alert_manager_definition(workspaceId=workspace, data=definition)
    amp.put_alert_manager_definition(workspaceId=workspace, data=definition + b"# changed\n")
    found = amp.describe_alert_manager_definition(workspaceId=workspace)["alertManagerDefinition"]
    assert (found["status"], found["data"]) == ({"statusCode": "ACTIVE"}, definition + b"# changed\n")
    amp.delete_alert_manager_definition(workspaceId=workspace)
    assert refusal(amp.describe_alert_manager_definition, workspaceId=workspace)[0] == "ResourceNotFoundException"


def test_missing_action_is_an_error_in_the_services_protocol(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The cases are JSON, EC2's XML, query, REST, a path that moto lacks, and a service that moto lacks."""
    actions: list[tuple[str, str, dict[str, Any]]] = [
        ("service-quotas", "ListServiceQuotas", {"ServiceCode": "ec2"}),
        ("ec2", "DescribeCapacityBlockOfferings", {"CapacityDurationHours": 24}),
        ("sts", "GetWebIdentityToken", {"Audience": ["x"], "SigningAlgorithm": "RS256"}),
        ("eks", "ListInsights", {"clusterName": "x"}),
        ("amp", "ListScrapers", {}),
        ("grafana", "ListWorkspaces", {}),
    ]
    with LocalAws() as separate_aws:
        for service, action, request in actions * 2:
            call = getattr(client(separate_aws, service), xform_name(action))
            with pytest.raises(ClientError, match=f"does not implement {service} {action}") as caught:
                call(**request)
            assert caught.value.response["Error"]["Code"] == "NotImplemented"
            assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 501
    printed = capfd.readouterr().err.splitlines()
    assert printed == [f"left out: {service} {action}" for service, action, _ in actions]


def test_responses_are_not_labelled_html(aws: LocalAws) -> None:
    with pytest.raises(ClientError) as caught:
        client(aws, "s3", "us-east-1").head_bucket(Bucket="nowhere-at-all")
    groups = client(aws, "logs").describe_log_groups()
    for answer in (caught.value.response["ResponseMetadata"], groups["ResponseMetadata"]):
        assert "html" not in answer["HTTPHeaders"].get("content-type", "")


def test_internal_failure_is_an_aws_error_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Any) -> str:
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(TokenResponse, "get_caller_identity", broken)
    monkeypatch.setattr(Response, "default_mimetype", Response.default_mimetype)
    form = {"Action": "GetCallerIdentity", "Version": "2011-06-15"}
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=local/20270101/us-east-1/sts/aws4_request, Signature=x"}
    for _ in range(2):
        answer = Client(application()).post("/", data=form, headers=signed)
        assert (answer.status_code, "html" in answer.text) == (500, False)
        assert "<Code>InternalFailure</Code>" in answer.text
        assert "ZeroDivisionError: deep inside" in answer.text
    assert capsys.readouterr().err.count("Traceback (most recent call last)") == 1


def test_backups_of_efs_are_switched_on_and_off(aws: LocalAws) -> None:
    efs = client(aws, "efs")
    system = {"FileSystemId": efs.create_file_system(CreationToken="a", Encrypted=True)["FileSystemId"]}
    assert efs.put_backup_policy(**system, BackupPolicy={"Status": "ENABLED"})["BackupPolicy"] == {"Status": "ENABLED"}
    assert efs.describe_backup_policy(**system)["BackupPolicy"] == {"Status": "ENABLED"}
    efs.put_backup_policy(**system, BackupPolicy={"Status": "DISABLED"})
    assert efs.describe_backup_policy(**system)["BackupPolicy"] == {"Status": "DISABLED"}
