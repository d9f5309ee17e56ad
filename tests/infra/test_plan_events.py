"""The rules pass the notices that concern a cluster, as AWS's pages show them, and no others that can be told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from botocore.loaders import Loader
from moto.events.models import EventPattern, EventPatternParser

from infra.config import ClusterSpec, parse
from infra.plan.place import Place
from infra.plan.watch.interruptions import RECEIVE_LIMIT, RETENTION_SECONDS, channel, patterns
from lustrain import capacity_events as events
from tests.infra import edits

PLACE = Place("us-east-1", "123456789012")
NODE = "i-1234567890abcdef0"
BLOCK = "cr-0123456789abcdef0"


def spec(backend: str = "ec2", name: str = "llm", groups: list[dict[str, Any]] | None = None) -> ClusterSpec:
    worker = {"name": "train", "instance_type": "p5.48xlarge", "count": 2}
    return parse({"name": name, "backend": backend, "zone_id": "use1-az4", "groups": groups or [worker]})


def with_capacity(**capacity: Any) -> ClusterSpec:
    return spec(groups=[{"name": "train", "instance_type": "p5.48xlarge", "count": 2, "capacity": capacity}])


def event(source: str, kind: str, detail: dict[str, Any], resource: str = NODE) -> dict[str, Any]:
    """What rules go by, as AWS's pages show it."""
    return {"source": source, "detail-type": kind, "account": "123456789012", "resources": [resource], "detail": detail}


SPOT = event("aws.ec2", events.SPOT, {"instance-id": NODE, "instance-action": "terminate"})
REBALANCE = event("aws.ec2", events.REBALANCE, {"instance-id": NODE})


def taken_back(kind: str) -> dict[str, Any]:
    end = "2026-11-21T18:02:00Z"
    detail = {"instance-id": NODE, "instance-action": "terminate", "instance-termination-time": end, "azId": "use1-az4"}
    return event("aws.ec2", kind, detail)


def block_end(kind: str, reservation: str = BLOCK) -> dict[str, Any]:
    arn = f"arn:aws:ec2:us-east-1:123456789012:capacity-reservation/{reservation}"
    return event("aws.ec2", kind, {"capacity-reservation-id": reservation, "end-date": "2026-11-22T11:30:00Z"}, arn)


def hook(group: str, kind: str = events.TERMINATE) -> dict[str, Any]:
    detail = {"AutoScalingGroupName": group, "LifecycleHookName": "flush", "EC2InstanceId": NODE}
    return event("aws.autoscaling", kind, {**detail, "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING"})


def health(service: str = "EC2", category: str = "scheduledChange") -> dict[str, Any]:
    code = "AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED"
    return event(
        "aws.health", events.HEALTH, {"service": service, "eventTypeCode": code, "eventTypeCategory": category}
    )


def cluster_state(cluster: str) -> dict[str, Any]:
    return event("aws.sagemaker", events.HYPERPOD_STATE, {"ClusterName": cluster, "ClusterStatus": "Failed"})


def node_health(cluster: str) -> dict[str, Any]:
    summary = {"HealthStatus": "Unhealthy", "HealthStatusReason": "NvidiaErrorTerminate", "RepairAction": "Replace"}
    detail = {"ClusterName": cluster, "InstanceId": NODE, "HealthSummary": summary}
    return event("aws.sagemaker", events.HYPERPOD_NODE, detail)


LAUNCH_FAILED = "Instance creation in Cluster llm and InstanceGroup train failed"


def cluster_event(cluster: str, level: str = "Info", description: str = LAUNCH_FAILED) -> dict[str, Any]:
    """As the events reference shows it."""
    where = {"ClusterName": cluster, "InstanceGroupName": "train", "InstanceId": NODE, "ResourceType": "Instance"}
    inner = {**where, "EventLevel": level, "Description": description}
    return event("aws.sagemaker", events.HYPERPOD_EVENT, {"EventDetails": inner})


def passed_by(cluster: ClusterSpec, notice: Any) -> set[str]:
    """Keys of the rules that pass the event."""
    found = set()
    for signal in patterns(cluster):
        text = json.dumps(signal.pattern)
        if EventPattern(text, EventPatternParser(text).parse()).matches_event(notice):
            found.add(signal.key)
    return found


ON_DEMAND, ON_SPOT = spec(), with_capacity(mode="spot")
RESERVED = with_capacity(mode="reservation", reservation=BLOCK)
IN_BLOCK = with_capacity(mode="capacity-block", reservation=BLOCK)
SLURM, EKS = spec("hyperpod-slurm"), spec("hyperpod-eks")
CASES: list[tuple[ClusterSpec, dict[str, Any], str | None]] = [
    (ON_SPOT, SPOT, "spot"),
    (ON_DEMAND, SPOT, None),
    (ON_SPOT, REBALANCE, "rebalance"),
    (ON_DEMAND, REBALANCE, None),
    *((RESERVED, taken_back(kind), "reservation") for kind in events.RESERVATION_INTERRUPTION),
    *((IN_BLOCK, taken_back(kind), "reservation") for kind in events.RESERVATION_INTERRUPTION),
    *((ON_SPOT, taken_back(kind), None) for kind in events.RESERVATION_INTERRUPTION),
    *((IN_BLOCK, block_end(kind), "block-end") for kind in events.BLOCK_END),
    *((IN_BLOCK, block_end(kind, "cr-0fedcba9876543210"), None) for kind in events.BLOCK_END),
    (ON_DEMAND, hook("llm-train-gang-1a2b3c4"), "terminate"),
    (ON_DEMAND, hook("other-train-gang-1a2b3c4"), None),
    (ON_DEMAND, hook("llm-p5-train-gang-1a2b3c4"), None),
    (ON_DEMAND, hook("llm-train-gang-1a2b3c4", "EC2 Instance-launch Lifecycle Action"), None),
    (ON_DEMAND, health(), "health"),
    (ON_DEMAND, health(category="accountNotification"), None),
    (ON_DEMAND, health(service="RDS"), None),
    (SLURM, health(service="SAGEMAKER"), "health"),
    *((cluster, cluster_state("llm"), "cluster-state") for cluster in (SLURM, EKS)),
    *((cluster, node_health("llm"), "node-health") for cluster in (SLURM, EKS)),
    *((cluster, cluster_event("llm"), "cluster-event") for cluster in (SLURM, EKS)),
    *((SLURM, notice("llm-2"), None) for notice in (cluster_state, node_health, cluster_event)),
    *((EKS, notice("llm-2"), None) for notice in (cluster_state, node_health, cluster_event)),
    *((ON_DEMAND, notice("llm"), None) for notice in (cluster_state, node_health, cluster_event)),
]


@pytest.mark.parametrize(("cluster", "notice", "key"), CASES)
def test_the_notices_that_concern_a_cluster_pass_one_rule(
    cluster: ClusterSpec, notice: dict[str, Any], key: str | None
) -> None:
    """A cluster whose name begins with ours is another one."""
    assert passed_by(cluster, notice) == ({key} if key else set())


@pytest.mark.parametrize("backend", ["hyperpod-slurm", "hyperpod-eks"])
def test_node_hyperpod_could_not_launch_is_mailed_queued_once(backend: str) -> None:
    plan = channel(spec(backend), PLACE)
    passing = passed_by(spec(backend), cluster_event("llm", "Error"))
    assert passing & {signal.key for signal in plan.mailed} == {"cluster-error"}
    assert passing & {signal.key for signal in plan.queued} == {"cluster-event"}
    assert passed_by(spec(backend), cluster_event("llm-2", "Error")) == set()
    assert "cluster-error" not in passed_by(spec(backend), cluster_event("llm", "Warn"))
    assert not any("cluster-error" in arn for arn in rules_of(plan.queue_policy))
    assert any("cluster-error" in arn for arn in rules_of(plan.dead_letters_policy))


@pytest.mark.parametrize("level", ["Info", "Warn", "Error"])
def test_node_with_failed_lifecycle_script_is_always_mailed(level: str) -> None:
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


@pytest.mark.parametrize("stack", edits.STACKS)
def test_every_example_stack_has_a_channel_that_aws_accepts(stack: str) -> None:
    cluster = edits.spec_of(stack, {})
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


def test_looks_of_readers_bring_no_message_to_the_dead_letters() -> None:
    assert RETENTION_SECONDS / events.LOOK_S < RECEIVE_LIMIT <= 1000


def test_arns_follow_the_partition() -> None:
    china = Place("cn-north-1", "123456789012", "aws-cn")
    assert '"arn:aws:' not in json.dumps(vars(channel(spec(), china)), default=vars)
