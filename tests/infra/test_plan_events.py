"""The rules pass the notices that concern a cluster, as AWS's pages show them, and no others that can be told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.loaders import Loader
from moto.events.models import EventPattern, EventPatternParser

from infra.config import ClusterSpec, parse
from infra.plan.place import Place
from infra.plan.watch import interruptions as events
from infra.plan.watch.interruptions import channel, patterns
from tests.infra import edits

PLACE = Place("us-east-1", "123456789012")
STACKS = [Path(f"infra/Pulumi.{name}.yaml") for name in edits.STACKS]
NODE = "i-1234567890abcdef0"
BLOCK = "cr-0123456789abcdef0"


def spec(backend: str = "ec2", name: str = "llm", groups: list[dict[str, Any]] | None = None) -> ClusterSpec:
    worker = {"name": "train", "instance_type": "p5.48xlarge", "count": 2}
    return parse({"name": name, "backend": backend, "zone_id": "use1-az4", "groups": groups or [worker]})


def with_capacity(**capacity: Any) -> ClusterSpec:
    return spec(groups=[{"name": "train", "instance_type": "p5.48xlarge", "count": 2, "capacity": capacity}])


def event(source: str, kind: str, detail: dict[str, Any], resources: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "version": "0",
        "id": "12345678-1234-1234-1234-123456789012",
        "detail-type": kind,
        "source": source,
        "account": "123456789012",
        "time": "2026-11-21T18:00:00Z",
        "region": "us-east-1",
        "resources": list(resources),
        "detail": detail,
    }


INSTANCE_ARN = f"arn:aws:ec2:us-east-1:123456789012:instance/{NODE}"
SPOT = event("aws.ec2", events.SPOT, {"instance-id": NODE, "instance-action": "terminate"}, (INSTANCE_ARN,))
REBALANCE = event("aws.ec2", events.REBALANCE, {"instance-id": NODE}, (INSTANCE_ARN,))
STATE_CHANGE = event("aws.ec2", "EC2 Instance State-change Notification", {"instance-id": NODE, "state": "running"})


def taken_back(kind: str) -> dict[str, Any]:
    end = "2026-11-21T18:02:00Z"
    detail = {"instance-id": NODE, "instance-action": "terminate", "instance-termination-time": end, "azId": "use1-az4"}
    return event("aws.ec2", kind, detail, (INSTANCE_ARN,))


def block_end(kind: str, reservation: str = BLOCK) -> dict[str, Any]:
    arn = f"arn:aws:ec2:us-east-1:123456789012:capacity-reservation/{reservation}"
    return event("aws.ec2", kind, {"capacity-reservation-id": reservation, "end-date": "2026-11-22T11:30:00Z"}, (arn,))


def hook(group: str, kind: str = events.TERMINATE) -> dict[str, Any]:
    return event(
        "aws.autoscaling",
        kind,
        {
            "LifecycleActionToken": "87654321-4321-4321-4321-210987654321",
            "AutoScalingGroupName": group,
            "LifecycleHookName": "flush",
            "EC2InstanceId": NODE,
            "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
            "Origin": "AutoScalingGroup",
            "Destination": "EC2",
        },
    )


def health(service: str = "EC2", category: str = "scheduledChange") -> dict[str, Any]:
    return event(
        "aws.health",
        events.HEALTH,
        {
            "eventArn": "arn:aws:health:us-east-1::event/EC2/AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED/one",
            "service": service,
            "eventTypeCode": "AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED",
            "eventTypeCategory": category,
            "affectedEntities": [{"entityValue": NODE}],
        },
        (NODE,),
    )


CLUSTER_ARN = "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghij12"


def cluster_state(cluster: str) -> dict[str, Any]:
    detail = {"ClusterArn": CLUSTER_ARN, "ClusterName": cluster, "ClusterStatus": "Failed", "InstanceGroups": []}
    return event("aws.sagemaker", events.HYPERPOD_STATE, detail, (CLUSTER_ARN,))


def node_health(cluster: str) -> dict[str, Any]:
    summary = {"HealthStatus": "Unhealthy", "HealthStatusReason": "NvidiaErrorTerminate", "RepairAction": "Replace"}
    detail = {"ClusterName": cluster, "ClusterArn": CLUSTER_ARN, "InstanceId": NODE, "HealthSummary": summary}
    return event("aws.sagemaker", events.HYPERPOD_NODE, detail, (CLUSTER_ARN,))


LAUNCH_FAILED = "Instance creation in Cluster llm and InstanceGroup train failed"


def cluster_event(cluster: str, level: str = "Info", description: str = LAUNCH_FAILED) -> dict[str, Any]:
    """As the events reference shows it."""
    failure = "We currently do not have sufficient capacity to launch new ml.p5.48xlarge instances. Please try again."
    inner = {
        "EventId": "83ea0bb5-be77-45e8-a458-0a87f778a205",
        "ClusterArn": CLUSTER_ARN,
        "ClusterName": cluster,
        "InstanceGroupName": "train",
        "InstanceId": NODE,
        "ResourceType": "Instance",
        "EventTime": 1748794825350,
        "EventLevel": level,
        "Description": description,
        "EventDetails": {"EventMetadata": {"Instance": {"FailureMessage": failure, "NodeLogicalId": "df268d19"}}},
    }
    return event("aws.sagemaker", events.HYPERPOD_EVENT, {"EventDetails": inner}, (CLUSTER_ARN,))


def passed_by(cluster: ClusterSpec, notice: Any) -> set[str]:
    """Keys of the rules that pass the event."""
    found = set()
    for signal in patterns(cluster):
        text = json.dumps(signal.pattern)
        if EventPattern(text, EventPatternParser(text).parse()).matches_event(notice):
            found.add(signal.key)
    return found


@pytest.mark.parametrize(("notice", "key"), [(SPOT, "spot"), (REBALANCE, "rebalance")], ids=["spot", "rebalance"])
def test_notices_about_spot_pass_where_there_is_spot_and_only_there(notice: dict[str, Any], key: str) -> None:
    assert passed_by(with_capacity(mode="spot"), notice) == {key}
    assert passed_by(with_capacity(mode="on-demand"), notice) == set()


@pytest.mark.parametrize("kind", events.RESERVATION_INTERRUPTION)
def test_both_names_of_a_reservation_that_ends_pass(kind: str) -> None:
    assert passed_by(with_capacity(mode="reservation", reservation=BLOCK), taken_back(kind)) == {"reservation"}
    assert passed_by(with_capacity(mode="capacity-block", reservation=BLOCK), taken_back(kind)) == {"reservation"}
    assert passed_by(with_capacity(mode="spot"), taken_back(kind)) == set()


@pytest.mark.parametrize("kind", events.BLOCK_END)
def test_both_names_of_the_end_of_a_capacity_block_pass_for_our_block_only(kind: str) -> None:
    ours = with_capacity(mode="capacity-block", reservation=BLOCK)
    assert passed_by(ours, block_end(kind)) == {"block-end"}
    assert passed_by(ours, block_end(kind, "cr-0fedcba9876543210")) == set()


def test_lifecycle_hooks_pass_for_this_clusters_groups_only() -> None:
    assert passed_by(spec(), hook("llm-train-gang-1a2b3c4")) == {"terminate"}
    assert passed_by(spec(), hook("other-train-gang-1a2b3c4")) == set()
    assert passed_by(spec(), hook("llm-p5-train-gang-1a2b3c4")) == set(), "a cluster whose name begins with ours"
    assert passed_by(spec(), hook("llm-train-gang-1a2b3c4", "EC2 Instance-launch Lifecycle Action")) == set()


def test_scheduled_changes_pass_and_other_health_notices_do_not() -> None:
    assert passed_by(spec(), health()) == {"health"}
    assert passed_by(spec(), health(category="accountNotification")) == set()
    assert passed_by(spec(), health(service="RDS")) == set()
    assert passed_by(spec("hyperpod-slurm"), health(service="SAGEMAKER")) == {"health"}


@pytest.mark.parametrize(
    ("notice", "key"),
    [(cluster_state, "cluster-state"), (node_health, "node-health"), (cluster_event, "cluster-event")],
)
@pytest.mark.parametrize("backend", ["hyperpod-slurm", "hyperpod-eks"])
def test_hyperpod_notices_pass_for_this_cluster_only(backend: str, notice: Any, key: str) -> None:
    assert passed_by(spec(backend), notice("llm")) == {key}
    assert passed_by(spec(backend), notice("llm-2")) == set()
    assert passed_by(spec("ec2"), notice("llm")) == set()


@pytest.mark.parametrize("backend", ["hyperpod-slurm", "hyperpod-eks"])
def test_a_node_that_hyperpod_could_not_launch_is_mailed_and_reaches_the_queue_once(backend: str) -> None:
    plan = channel(spec(backend), PLACE)
    passing = passed_by(spec(backend), cluster_event("llm", "Error"))
    assert passing & {signal.key for signal in plan.mailed} == {"cluster-error"}
    assert passing & {signal.key for signal in plan.queued} == {"cluster-event"}
    assert passed_by(spec(backend), cluster_event("llm-2", "Error")) == set()
    assert "cluster-error" not in passed_by(spec(backend), cluster_event("llm", "Warn"))
    assert not any("cluster-error" in arn for arn in rules_of(plan.queue_policy))
    assert any("cluster-error" in arn for arn in rules_of(plan.dead_letters_policy))


@pytest.mark.parametrize("level", ["Info", "Warn", "Error"])
def test_a_node_whose_lifecycle_script_failed_is_mailed_whatever_level_hyperpod_gives_it(level: str) -> None:
    """Both descriptions are the events reference's, with a log group in the place of its dots."""
    ran = f"Instance lifecycle script execution for EC2 Instance {NODE} has"
    group = "/aws/sagemaker/Clusters/llm/abcdefghij12"
    failed = f"{ran} Failed. To view lifecycle script logs, visit log group {group}"
    assert "cluster-error" in passed_by(spec("hyperpod-slurm"), cluster_event("llm", level, failed))
    assert "cluster-error" in passed_by(spec("hyperpod-eks"), cluster_event("llm", level, f"{ran} Failed"))
    assert passed_by(spec("hyperpod-eks"), cluster_event("llm-2", level, failed)) == set()
    succeeded = passed_by(spec("hyperpod-slurm"), cluster_event("llm", "Info", f"{ran} Succeeded"))
    assert succeeded == {"cluster-event"}


def rules_of(policy: Mapping[str, Any]) -> list[str]:
    """The rules that a queue takes messages of."""
    (found,) = [one for one in policy["Statement"] if one["Sid"] == "FromRules"]
    return list(found["Condition"]["ArnEquals"]["aws:SourceArn"])


def test_what_is_no_notice_passes_nowhere() -> None:
    for cluster in (spec(), with_capacity(mode="spot"), spec("hyperpod-eks")):
        assert passed_by(cluster, STATE_CHANGE) == set()


@pytest.mark.parametrize("stack", STACKS, ids=lambda path: path.stem)
def test_every_example_stack_has_a_channel_that_aws_accepts(stack: Path) -> None:
    cluster = parse(yaml.safe_load(stack.read_text(encoding="utf-8"))["config"]["lustrain:cluster"])
    plan = channel(cluster, PLACE)
    shapes = Loader().load_service_model("events", "service-2")["shapes"]
    assert plan.signals
    assert len(plan.queue) <= 80
    assert len(plan.dead_letters) <= 80
    for signal in plan.signals:
        assert len(plan.rule_names[signal.key]) <= shapes["RuleName"]["max"]
        assert len(signal.description) <= shapes["RuleDescription"]["max"]
        assert len(json.dumps(signal.pattern)) <= 2048
        EventPatternParser(json.dumps(signal.pattern)).parse()


def test_only_the_clusters_own_rules_may_write_to_the_queue_and_only_over_tls() -> None:
    plan = channel(with_capacity(mode="spot"), PLACE)
    for policy, queue in ((plan.queue_policy, plan.queue), (plan.dead_letters_policy, plan.dead_letters)):
        tls, rules = policy["Statement"]
        assert (tls["Effect"], tls["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
        assert rules["Principal"] == {"Service": "events.amazonaws.com"}
        assert rules["Action"] == "sqs:SendMessage"
        assert rules["Resource"] == f"arn:aws:sqs:us-east-1:123456789012:{queue}"
        assert rules["Condition"]["ArnEquals"]["aws:SourceArn"] == [
            f"arn:aws:events:us-east-1:123456789012:rule/llm-{key}"
            for key in ("terminate", "health", "spot", "rebalance")
        ]


def test_people_are_mailed_about_what_they_can_plan_for_and_not_about_every_spot_notice() -> None:
    assert {signal.key for signal in channel(with_capacity(mode="spot"), PLACE).mailed} == {"health"}
    block = with_capacity(mode="capacity-block", reservation=BLOCK)
    assert {signal.key for signal in channel(block, PLACE).mailed} == {"health", "block-end"}
    assert {signal.key for signal in channel(spec("hyperpod-slurm"), PLACE).mailed} == {
        "health",
        "node-health",
        "cluster-error",
    }


def test_the_topic_takes_this_clusters_alarms_and_rules_without_a_condition_that_eventbridge_cannot_meet() -> None:
    statements = {one["Sid"]: one for one in channel(spec(), PLACE).topic_policy["Statement"]}
    alarms, rules = statements["FromAlarms"]["Condition"], statements["FromRules"]
    assert alarms["ArnLike"] == {"aws:SourceArn": "arn:aws:cloudwatch:us-east-1:123456789012:alarm:llm-*"}
    assert alarms["StringEquals"] == {"aws:SourceAccount": "123456789012"}
    assert (rules["Principal"], rules["Action"]) == ({"Service": "events.amazonaws.com"}, "sns:Publish")
    assert rules["Resource"] == "arn:aws:sns:us-east-1:123456789012:llm-alarms"
    assert "Condition" not in rules


def test_arns_follow_the_partition() -> None:
    china = Place("cn-north-1", "123456789012", "aws-cn")
    assert '"arn:aws:' not in json.dumps(vars(channel(spec(), china)), default=vars)
