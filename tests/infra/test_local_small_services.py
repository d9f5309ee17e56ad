"""Budgets, S3, ECR, IAM and SQS of the embedded AWS: what was set reads back, what the services refuse is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
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
def budgets(aws: LocalAws) -> Any:
    return client(aws, "budgets")


@pytest.fixture(scope="module")
def s3(aws: LocalAws) -> Any:
    return client(aws, "s3", "us-east-1")


def notification(threshold: float, kind: str = "ACTUAL") -> dict[str, Any]:
    return {"NotificationType": kind, "ComparisonOperator": "GREATER_THAN", "Threshold": threshold}


def budget(name: str, amount: str = "100") -> dict[str, Any]:
    return {
        "BudgetName": name,
        "BudgetType": "COST",
        "TimeUnit": "MONTHLY",
        "BudgetLimit": {"Amount": amount, "Unit": "USD"},
    }


ONE = [{"SubscriptionType": "EMAIL", "Address": "ops@example.com"}]


def test_a_budget_is_changed_tagged_and_tells_its_subscribers(budgets: Any) -> None:
    mine: dict[str, str] = {"AccountId": ACCOUNT, "BudgetName": "mine"}
    budgets.create_budget(
        AccountId=ACCOUNT, Budget=budget("mine"), ResourceTags=[{"Key": "lustrain:cluster", "Value": "demo"}]
    )
    for threshold, kind in ((50, "ACTUAL"), (100, "ACTUAL"), (100, "FORECASTED")):
        budgets.create_notification(**mine, Notification=notification(threshold, kind), Subscribers=ONE)
    shown = budgets.describe_notifications_for_budget(**mine)["Notifications"]
    assert [(one["Threshold"], one["NotificationType"], one["ThresholdType"]) for one in shown] == [
        (50.0, "ACTUAL", "PERCENTAGE"),
        (100.0, "ACTUAL", "PERCENTAGE"),
        (100.0, "FORECASTED", "PERCENTAGE"),
    ]
    assert budgets.describe_subscribers_for_notification(**mine, Notification=shown[2])["Subscribers"] == ONE
    period = {"Start": datetime(2026, 1, 1, tzinfo=UTC)}
    budgets.update_budget(AccountId=ACCOUNT, NewBudget={**budget("mine", "200"), "TimePeriod": period})
    after = budgets.describe_budget(**mine)["Budget"]
    assert (after["BudgetLimit"]["Amount"], after["TimePeriod"]["Start"]) == ("200", period["Start"])
    budgets.delete_notification(**mine, Notification=notification(50))
    assert len(budgets.describe_notifications_for_budget(**mine)["Notifications"]) == 2
    arn = f"arn:aws:budgets::{ACCOUNT}:budget/mine"
    budgets.tag_resource(ResourceARN=arn, ResourceTags=[{"Key": "a", "Value": "b"}])
    budgets.untag_resource(ResourceARN=arn, ResourceTagKeys=["lustrain:cluster"])
    assert budgets.list_tags_for_resource(ResourceARN=arn)["ResourceTags"] == [{"Key": "a", "Value": "b"}]


def test_what_budgets_refuses_is_refused(budgets: Any) -> None:
    budgets.create_budget(AccountId=ACCOUNT, Budget=budget("strict"))
    asked = {"AccountId": ACCOUNT, "BudgetName": "strict", "Notification": notification(80), "Subscribers": ONE}
    budgets.create_notification(**asked)
    assert refusal(budgets.create_notification, **asked)[0] == "DuplicateRecordException"
    many = [{"SubscriptionType": "EMAIL", "Address": f"a{n}@example.com"} for n in range(11)]
    changes: list[dict[str, Any]] = [
        {"Subscribers": many},
        {"Subscribers": []},
        {"Subscribers": [{"SubscriptionType": "EMAIL", "Address": "ops"}]},
        {"Notification": {**notification(90), "ComparisonOperator": "MORE"}},
    ]
    for change in changes:
        assert refusal(budgets.create_notification, **{**asked, "Notification": notification(90), **change})[0] == (
            "InvalidParameterException"
        )
    assert refusal(budgets.update_budget, AccountId=ACCOUNT, NewBudget=budget("none"))[0] == "NotFoundException"
    gone = {**asked, "Notification": notification(70)}
    del gone["Subscribers"]
    assert refusal(budgets.delete_notification, **gone)[0] == "NotFoundException"


def test_a_policy_that_denies_plain_http_denies_nothing_here_and_one_without_condition_denies(s3: Any) -> None:
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


def test_lifecycle_rules_read_back(s3: Any) -> None:
    s3.create_bucket(Bucket="rules")
    assert refusal(s3.get_bucket_lifecycle_configuration, Bucket="rules")[0] == "NoSuchLifecycleConfiguration"
    every: dict[str, Any] = {"Status": "Enabled", "Filter": {"Prefix": ""}}
    rules = [
        {"ID": "abort", **every, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}},
        {"ID": "ephemeral", "Status": "Enabled", "Filter": {"Prefix": "ephemeral/"}, "Expiration": {"Days": 7}},
        {"ID": "old", **every, "NoncurrentVersionExpiration": {"NoncurrentDays": 3}},
        {"ID": "cold", **every, "Transitions": [{"Days": 30, "StorageClass": "GLACIER_IR"}]},
        {"ID": "markers", **every, "Expiration": {"ExpiredObjectDeleteMarker": True}},
    ]
    s3.put_bucket_lifecycle_configuration(Bucket="rules", LifecycleConfiguration={"Rules": rules})
    assert s3.get_bucket_lifecycle_configuration(Bucket="rules")["Rules"] == rules


def test_a_versioned_bucket_with_delete_markers_can_be_emptied_and_deleted(s3: Any) -> None:
    s3.create_bucket(Bucket="emptied")
    s3.put_bucket_versioning(Bucket="emptied", VersioningConfiguration={"Status": "Enabled"})
    s3.put_bucket_notification_configuration(
        Bucket="emptied", NotificationConfiguration={"EventBridgeConfiguration": {}}
    )
    s3.put_object(Bucket="emptied", Key="a", Body=b"x")
    s3.delete_object(Bucket="emptied", Key="a")
    assert refusal(s3.delete_bucket, Bucket="emptied")[0] == "BucketNotEmpty"
    shown = s3.list_object_versions(Bucket="emptied")
    everything = [
        {"Key": one["Key"], "VersionId": one["VersionId"]} for one in [*shown["Versions"], *shown["DeleteMarkers"]]
    ]
    assert "Errors" not in s3.delete_objects(Bucket="emptied", Delete={"Objects": everything})
    s3.delete_bucket(Bucket="emptied")


def test_scanning_of_images_is_switched_off_and_on(aws: LocalAws) -> None:
    ecr = client(aws, "ecr")
    ecr.create_repository(
        repositoryName="r",
        imageTagMutability="IMMUTABLE",
        imageScanningConfiguration={"scanOnPush": True},
        encryptionConfiguration={"encryptionType": "AES256"},
    )
    for wanted, on in (({}, False), ({"scanOnPush": True}, True), ({"scanOnPush": False}, False)):
        ecr.put_image_scanning_configuration(repositoryName="r", imageScanningConfiguration=wanted)
        shown = ecr.describe_repositories(repositoryNames=["r"])["repositories"][0]
        assert shown["imageScanningConfiguration"] == {"scanOnPush": on}
    assert (shown["imageTagMutability"], shown["encryptionConfiguration"]) == (
        "IMMUTABLE",
        {"encryptionType": "AES256"},
    )


def test_policies_that_aws_keeps_attach_and_others_do_not(aws: LocalAws) -> None:
    iam = client(aws, "iam")
    iam.create_role(RoleName="managed", AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": []}))
    iam.attach_role_policy(RoleName="managed", PolicyArn="arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore")
    assert (
        refusal(iam.attach_role_policy, RoleName="managed", PolicyArn="arn:aws:iam::aws:policy/None")[0]
        == "NoSuchEntity"
    )


def test_a_redrive_policy_is_told_as_the_service_tells_it(aws: LocalAws) -> None:
    sqs = client(aws, "sqs")
    sqs.create_queue(QueueName="redriven")
    policy = {"deadLetterTargetArn": f"arn:aws:sqs:us-west-2:{ACCOUNT}:redriven", "maxReceiveCount": 5}
    made = sqs.create_queue(QueueName="live", Attributes={"RedrivePolicy": json.dumps(policy)})["QueueUrl"]
    shown = sqs.get_queue_attributes(QueueUrl=made, AttributeNames=["RedrivePolicy"])["Attributes"]["RedrivePolicy"]
    assert shown == json.dumps(policy, separators=(",", ":"))


def test_what_is_not_implemented_is_an_error_in_the_services_protocol_and_a_line_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """JSON, EC2's XML, query, REST by its path, a path that moto does not have, a service that moto does not have."""
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("service-quotas", "ListServiceQuotas", {"ServiceCode": "ec2"}),
        ("ec2", "DescribeCapacityBlockOfferings", {"CapacityDurationHours": 24}),
        ("sts", "GetWebIdentityToken", {"Audience": ["x"], "SigningAlgorithm": "RS256"}),
        ("eks", "ListInsights", {"clusterName": "x"}),
        ("amp", "ListScrapers", {}),
        ("grafana", "ListWorkspaces", {}),
    ]
    with LocalAws() as own:
        for service, action, request in asked * 2:
            call = getattr(client(own, service), xform_name(action))
            with pytest.raises(ClientError, match=f"does not implement {service} {action}") as caught:
                call(**request)
            assert caught.value.response["Error"]["Code"] == "NotImplemented"
            assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 501
    said = capfd.readouterr().err.splitlines()
    assert said == [f"left out: {service} {action}" for service, action, _ in asked]


def test_no_answer_calls_itself_a_page(aws: LocalAws) -> None:
    with pytest.raises(ClientError) as caught:
        client(aws, "s3", "us-east-1").head_bucket(Bucket="nowhere-at-all")
    groups = client(aws, "logs").describe_log_groups()
    for answer in (caught.value.response["ResponseMetadata"], groups["ResponseMetadata"]):
        assert "html" not in answer["HTTPHeaders"].get("content-type", "")


def test_what_breaks_inside_is_an_error_of_aws_and_one_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Any) -> str:
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(TokenResponse, "get_caller_identity", broken)
    monkeypatch.setattr(Response, "default_mimetype", Response.default_mimetype)
    asked = {"Action": "GetCallerIdentity", "Version": "2011-06-15"}
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=local/20270101/us-east-1/sts/aws4_request, Signature=x"}
    for _ in range(2):
        answer = Client(application()).post("/", data=asked, headers=signed)
        assert (answer.status_code, "html" in answer.text) == (500, False)
        assert "<Code>InternalFailure</Code>" in answer.text
        assert "ZeroDivisionError: deep inside" in answer.text
    assert capsys.readouterr().err.count("Traceback (most recent call last)") == 1
