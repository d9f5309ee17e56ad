"""The channel, alarms, budget and repository as the real engine and provider make them, read back from the embedded AWS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from infra.local.aws import LocalAws
from infra.local.engine import Engine, engine_missing
from infra.plan.watch import interruptions as events
from tests.conftest import require

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MADE_BY = "well_made"


class Stack:
    """The stack once it is up, and clients of where it lies."""

    def __init__(self, folder: Path, aws: LocalAws) -> None:
        self.engine = Engine(folder, "test", aws.environment, program=HERE / MADE_BY)
        self.engine.up()
        self.outputs = self.engine.outputs()
        self.endpoint = aws.endpoint

    def client(self, service: str) -> Any:
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1")  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    require(not engine_missing(), engine_missing())
    with LocalAws() as server:
        yield Stack(tmp_path_factory.mktemp("channel") / "stack", server)


def test_nothing_is_left_to_do_after_up_and_after_a_refresh(stack: Stack) -> None:
    stack.engine("preview", "--expect-no-changes")
    stack.engine("refresh", "--yes", "--skip-preview", "--expect-no-changes")


def test_the_queue_is_encrypted_short_lived_and_has_a_dead_letter_queue(stack: Stack) -> None:
    sqs = stack.client("sqs")
    found = sqs.get_queue_attributes(QueueUrl=stack.outputs["queue_url"], AttributeNames=["All"])["Attributes"]
    assert found["QueueArn"].endswith(":llm-interruptions")
    assert found["SqsManagedSseEnabled"].lower() == "true"
    assert int(found["MessageRetentionPeriod"]) == events.RETENTION_SECONDS
    redrive = json.loads(found["RedrivePolicy"])
    assert redrive["deadLetterTargetArn"].endswith(":llm-interruptions-dead")
    dead = sqs.get_queue_url(QueueName="llm-interruptions-dead")["QueueUrl"]
    assert "FromRules" in sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["Policy"])["Attributes"]["Policy"]


def test_the_policies_name_the_rules_that_were_made(stack: Stack) -> None:
    client = stack.client("events")
    rules = {rule["Name"]: rule for rule in client.list_rules(NamePrefix="llm-")["Rules"]}
    attributes = stack.client("sqs").get_queue_attributes(
        QueueUrl=stack.outputs["queue_url"], AttributeNames=["Policy"]
    )
    statements = {one["Sid"]: one for one in json.loads(attributes["Attributes"]["Policy"])["Statement"]}
    named = statements["FromRules"]["Condition"]["ArnEquals"]["aws:SourceArn"]
    assert set(named) == {rule["Arn"] for rule in rules.values()}
    assert set(rules) == {"llm-terminate", "llm-health", "llm-spot", "llm-rebalance"}


def test_every_rule_writes_to_the_queue_and_those_for_people_to_the_topic_too(stack: Stack) -> None:
    client = stack.client("events")
    targets = {
        rule["Name"]: client.list_targets_by_rule(Rule=rule["Name"])["Targets"]
        for rule in client.list_rules(NamePrefix="llm-")["Rules"]
    }
    for found in targets.values():
        assert any(target["Arn"].endswith(":llm-interruptions") for target in found)
        assert all(target["DeadLetterConfig"]["Arn"].endswith(":llm-interruptions-dead") for target in found)
    to_topic = {name for name, found in targets.items() if stack.outputs["topic_arn"] in {one["Arn"] for one in found}}
    assert to_topic == {"llm-health"}


def test_people_are_asked_to_confirm_their_address(stack: Stack) -> None:
    found = stack.client("sns").list_subscriptions_by_topic(TopicArn=stack.outputs["topic_arn"])["Subscriptions"]
    assert [(one["Protocol"], one["Endpoint"]) for one in found] == [("email", "ops@example.com")]


def test_alarms_watch_the_things_of_the_stack_and_tell_the_topic(stack: Stack) -> None:
    alarms = {one["AlarmName"]: one for one in stack.client("cloudwatch").describe_alarms()["MetricAlarms"]}
    names = ["llm-lustre-full", "llm-home-full", "llm-train-incomplete", "llm-boot-failed", "llm-nat-traffic"]
    names += ["llm-notices-lost", "llm-notices-unread"]
    assert set(alarms) == set(names)
    watched = {
        name: {
            one["Value"]
            for query in alarm["Metrics"]
            for one in query.get("MetricStat", {}).get("Metric", {}).get("Dimensions", [])
        }
        for name, alarm in alarms.items()
    }
    group = "llm-train-gang-1a2b3c4"
    things: list[set[str]] = [{"fs-0123456789abcdef0"}, {"fs-0fedcba9876543210"}, {group}, {"llm"}]
    things += [{"nat-0123456789abcdef0"}, {"llm-interruptions-dead"}, {"llm-interruptions", group}]
    assert watched == dict(zip(names, things, strict=True))
    assert all(alarm["AlarmActions"] == [stack.outputs["topic_arn"]] for alarm in alarms.values())


def test_logs_end_and_the_dashboard_is_there(stack: Stack) -> None:
    (group,) = stack.client("logs").describe_log_groups(logGroupNamePrefix="/lustrain/")["logGroups"]
    assert (group["logGroupName"], group["retentionInDays"]) == (stack.outputs["log_group"], 30)
    body = json.loads(stack.client("cloudwatch").get_dashboard(DashboardName="llm-us-east-1")["DashboardBody"])
    assert "fs-0123456789abcdef0" in json.dumps(body)


def test_the_budget_goes_by_the_tag_and_mails(stack: Stack) -> None:
    account = stack.client("sts").get_caller_identity()["Account"]
    client = stack.client("budgets")
    (budget,) = client.describe_budgets(AccountId=account)["Budgets"]
    assert budget["CostFilters"] == {"TagKeyValue": ["user:lustrain:cluster$llm"]}
    assert float(budget["BudgetLimit"]["Amount"]) == 100
    notices = client.describe_notifications_for_budget(AccountId=account, BudgetName="llm-us-east-1-monthly")[
        "Notifications"
    ]
    found = sorted((one["NotificationType"], one["Threshold"]) for one in notices)
    assert found == [("ACTUAL", 50.0), ("ACTUAL", 80.0), ("ACTUAL", 100.0), ("FORECASTED", 100.0)]


def test_the_repository_does_not_let_tags_move(stack: Stack) -> None:
    client = stack.client("ecr")
    (found,) = client.describe_repositories(repositoryNames=["llm/trainer"])["repositories"]
    assert found["repositoryUri"] == stack.outputs["repository"]
    assert found["imageTagMutability"] == "IMMUTABLE"
    assert found["imageScanningConfiguration"] == {"scanOnPush": True}
    policy = json.loads(client.get_lifecycle_policy(repositoryName="llm/trainer")["lifecyclePolicyText"])
    assert policy["rules"][0]["selection"]["countNumber"] == 200


def test_a_destroy_takes_all_but_the_images(stack: Stack) -> None:
    stack.engine("destroy", "--yes", "--skip-preview")
    assert stack.client("events").list_rules(NamePrefix="llm-")["Rules"] == []
    assert stack.client("sqs").list_queues().get("QueueUrls", []) == []
    assert stack.client("cloudwatch").describe_alarms()["MetricAlarms"] == []
    assert len(stack.client("ecr").describe_repositories()["repositories"]) == 1
