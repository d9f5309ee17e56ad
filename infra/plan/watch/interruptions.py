"""The interruption channel: the notices of AWS that reach a cluster's queue, and those that are mailed.

EventBridge matches what stands in an event. Notices of Auto Scaling, of the end of a capacity block and of HyperPod name the
group, the reservation or the cluster; those rules pass this cluster's only. Those of EC2 about one instance (spot,
rebalance, an interrupted reservation) name that instance and its ARN, never its tags or its group, and no rule can know
the ids of nodes to come: they pass for the whole account, as do scheduled changes of AWS Health.

Each run of the cluster reads the queue while it trains (`trainer/interrupt/queue.py`). A message is handed to one reader at a
time, which deletes it only if it is about a node of its own run; any other one comes back after LOOK_S seconds, for the run
that has the node, and ends by its age. Such messages do not count as unread: SQS leaves those that were received three times
out of the age of the oldest one
(https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-available-cloudwatch-metrics.html).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.config import CapacityMode, ClusterSpec
from infra.plan.documents import document, tls_only
from infra.plan.place import Place
from lustrain.capacity_events import (
    BLOCK_END,
    HEALTH,
    HYPERPOD_EVENT,
    HYPERPOD_NODE,
    HYPERPOD_STATE,
    REBALANCE,
    RESERVATION_INTERRUPTION,
    SPOT,
    TERMINATE,
)

RETENTION_SECONDS = 3600
"""A notice of the last hour may still be worth acting on (a capacity block says its end 40 minutes before); an older one
is about a machine that is gone, and a watcher that starts next day must not stop a healthy run for it. A queue that nothing
reads does not fill either."""
DEAD_LETTER_SECONDS = 14 * 24 * 3600
"""The longest that SQS keeps a message: time to find out why it was not read
(https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html)."""
RECEIVE_LIMIT = 1000
"""A message that was taken this often and never deleted goes to the dead-letter queue. It is the most that SQS allows
(https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SetQueueAttributes.html), and more than the looks
of LOOK_S seconds that fit into RETENTION_SECONDS: what no run acts on ends by its age, without an alarm."""
EVENT_AGE_SECONDS = 600
"""How long EventBridge tries to deliver; then the event goes to the dead-letter queue."""
RETRIES = 185
"""EventBridge's own default and limit (https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-rule-retry-policy.html)."""
LONG_POLL_SECONDS = 20

SCRIPT_FAILED = "*lifecycle script execution*Failed*"
"""In the words of that page: "Instance lifecycle script execution for EC2 Instance <id> has Failed. To view lifecycle script
logs, visit log group...". It does not say of which level such an event is."""
_FAILURES = ({"EventLevel": ["Error"]}, {"Description": [{"wildcard": SCRIPT_FAILED}]})


@dataclass(frozen=True)
class Signal:
    """One EventBridge rule: `key` ends its name; `mailed` sends its events to the topic, `queued` to the queue."""

    key: str
    description: str
    pattern: Mapping[str, Any]
    mailed: bool = False
    queued: bool = True


@dataclass(frozen=True)
class ChannelPlan:
    """Queue, dead-letter queue, topic, rules, and the policies that let the rules and alarms of this cluster write to them.

    Everything has a name of its own, so that the policies can be written before the things are there.
    """

    queue: str
    dead_letters: str
    topic: str
    emails: tuple[str, ...]
    signals: tuple[Signal, ...]
    rule_names: Mapping[str, str]
    """Name of the rule for each signal's key."""
    queue_policy: Mapping[str, Any]
    dead_letters_policy: Mapping[str, Any]
    topic_policy: Mapping[str, Any]
    redrive: Mapping[str, Any]

    @property
    def mailed(self) -> tuple[Signal, ...]:
        return tuple(signal for signal in self.signals if signal.mailed)

    @property
    def queued(self) -> tuple[Signal, ...]:
        return tuple(signal for signal in self.signals if signal.queued)


def queue_name(spec: ClusterSpec) -> str:
    return f"{spec.name}-interruptions"


def dead_letters_name(spec: ClusterSpec) -> str:
    return f"{queue_name(spec)}-dead"


def topic_name(spec: ClusterSpec) -> str:
    return f"{spec.name}-alarms"


def patterns(spec: ClusterSpec) -> tuple[Signal, ...]:
    """Return the notices that concern this cluster.

    HyperPod's nodes live in an account of the service, where EC2's own notices stay; and a rule for spot warnings in a
    cluster without spot would bring those of other clusters alone.
    """
    return _hyperpod(spec) if spec.hyperpod else _ec2(spec)


def channel(spec: ClusterSpec, place: Place) -> ChannelPlan:
    """Return the whole channel of a cluster.

    The topic has no KMS key: with AWS's own `alias/aws/sns` neither EventBridge nor CloudWatch alarms may publish
    (https://repost.aws/knowledge-center/cloudwatch-configure-alarm-sns), SNS encrypts its disks anyway, and what is
    published leaves as e-mail.
    """
    queue, dead, topic = queue_name(spec), dead_letters_name(spec), topic_name(spec)
    signals = patterns(spec)
    names = {signal.key: f"{spec.name}-{signal.key}" for signal in signals}
    rules = [place.arn("events", f"rule/{name}") for name in names.values()]
    queued = [place.arn("events", f"rule/{names[signal.key]}") for signal in signals if signal.queued]
    alerts = spec.monitor is not None and spec.observability.prometheus == "amp"
    queue_arn, dead_arn, topic_arn = place.arn("sqs", queue), place.arn("sqs", dead), place.arn("sns", topic)
    return ChannelPlan(
        queue=queue,
        dead_letters=dead,
        topic=topic,
        emails=spec.alarms.emails,
        signals=signals,
        rule_names=names,
        queue_policy=document([tls_only("sqs:*", queue_arn), _from_rules(queue_arn, queued)]),
        dead_letters_policy=document([tls_only("sqs:*", dead_arn), _from_rules(dead_arn, rules)]),
        topic_policy=document(
            [
                tls_only("sns:Publish", topic_arn),
                _from_any_rule(topic_arn),
                _from_alarms(topic_arn, place, f"{spec.name}-*"),
                *([_from_workspaces(topic_arn, place)] if alerts else []),
            ]
        ),
        redrive={"deadLetterTargetArn": dead_arn, "maxReceiveCount": RECEIVE_LIMIT},
    )


def _ec2(spec: ClusterSpec) -> tuple[Signal, ...]:
    modes: set[CapacityMode] = {group.capacity.mode for group in spec.groups}
    signals = [
        Signal(
            "terminate",
            "Auto Scaling is about to terminate a node of this cluster and waits for its lifecycle hook",
            {
                "source": ["aws.autoscaling"],
                "detail-type": [TERMINATE],
                "detail": {"AutoScalingGroupName": [{"prefix": prefix} for prefix in _group_prefixes(spec)]},
            },
        ),
        _health("EC2"),
    ]
    if "spot" in modes:
        signals += [
            Signal("spot", "EC2 takes back a spot instance in two minutes", _from_ec2(SPOT)),
            Signal(
                "rebalance", "A spot instance is at a higher risk than others to be taken back", _from_ec2(REBALANCE)
            ),
        ]
    if modes & {"reservation", "capacity-block"}:
        signals.append(
            Signal(
                "reservation",
                "EC2 terminates an instance because its reservation or block ends or is called back",
                _from_ec2(*RESERVATION_INTERRUPTION),
            )
        )
    if "capacity-block" in modes:
        signals.append(
            Signal(
                "block-end",
                "A capacity block ends in 40 minutes; its instances begin to terminate 10 minutes from now",
                {**_from_ec2(*BLOCK_END), **_of_reservations(spec)},
                mailed=True,
            )
        )
    return tuple(signals)


def _hyperpod(spec: ClusterSpec) -> tuple[Signal, ...]:
    ours = {"ClusterName": [spec.name]}
    return (
        Signal("cluster-state", "The HyperPod cluster changed its state", _from_sagemaker(HYPERPOD_STATE, ours)),
        Signal(
            "node-health",
            "HyperPod found a node unhealthy, or healthy again",
            _from_sagemaker(HYPERPOD_NODE, ours),
            mailed=True,
        ),
        Signal(
            "cluster-event",
            "HyperPod provisions, replaces or loses a node",
            _from_sagemaker(HYPERPOD_EVENT, {"EventDetails": ours}),
        ),
        # HyperPod has no count of nodes that an alarm could watch: what it could not launch, replace or set up, it says
        # here, with the node and the log group. A metric filter on that group would see no more and might fail the
        # deployment: its name has the cluster's id, and a node makes it when it first speaks, before or after we get there.
        # The queue has it from the rule above.
        Signal(
            "cluster-error",
            "HyperPod could not provision, replace or set up a node: the cluster may be short of it",
            _from_sagemaker(HYPERPOD_EVENT, {"EventDetails": {**ours, "$or": list(_FAILURES)}}),
            mailed=True,
            queued=False,
        ),
        _health("SAGEMAKER"),
    )


def _health(service: str) -> Signal:
    """Weeks ahead and about single machines, so people plan for it; readers go by `detail.affectedEntities`."""
    return Signal(
        "health",
        f"AWS has scheduled maintenance or retirement of something of {service} in this account",
        {
            "source": ["aws.health"],
            "detail-type": [HEALTH],
            "detail": {"service": [service], "eventTypeCategory": ["scheduledChange"]},
        },
        mailed=True,
    )


def _from_ec2(*kinds: str) -> dict[str, Any]:
    return {"source": ["aws.ec2"], "detail-type": list(kinds)}


def _from_sagemaker(kind: str, detail: Mapping[str, Any]) -> dict[str, Any]:
    return {"source": ["aws.sagemaker"], "detail-type": [kind], "detail": detail}


def _group_prefixes(spec: ClusterSpec) -> list[str]:
    """Auto Scaling groups are called `<cluster>-<group>-…`; a bare `<cluster>-` would take those of `<cluster>-2` too."""
    return [f"{spec.name}-{group.name}-" for group in spec.workers]


def _of_reservations(spec: ClusterSpec) -> dict[str, Any]:
    """Only the named blocks."""
    blocks = [group.capacity.reservation for group in spec.groups if group.capacity.mode == "capacity-block"]
    return {"detail": {"capacity-reservation-id": blocks}}


def _from(
    sid: str, service: str, action: str | list[str], arn: str, condition: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the statement that lets a service of AWS write to a queue or a topic."""
    statement = {
        "Sid": sid,
        "Effect": "Allow",
        "Principal": {"Service": f"{service}.amazonaws.com"},
        "Action": action,
        "Resource": arn,
    }
    return statement | ({"Condition": condition} if condition else {})


def _from_rules(arn: str, rules: Sequence[str]) -> dict[str, Any]:
    return _from("FromRules", "events", "sqs:SendMessage", arn, {"ArnEquals": {"aws:SourceArn": list(rules)}})


def _from_any_rule(topic: str) -> dict[str, Any]:
    """EventBridge tells SNS nothing that a condition could go by: with one, every notice is refused and lost
    (https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-troubleshooting.html). So any rule may write here that
    somebody points at this topic by its ARN."""
    return _from("FromRules", "events", "sns:Publish", topic)


def _from_alarms(topic: str, place: Place, names: str) -> dict[str, Any]:
    condition = _of_account(place, place.arn("cloudwatch", f"alarm:{names}"))
    return _from("FromAlarms", "cloudwatch", "sns:Publish", topic, condition)


def _from_workspaces(topic: str, place: Place) -> dict[str, Any]:
    """Let alert managers of the account's Prometheus workspaces write
    (https://docs.aws.amazon.com/prometheus/latest/userguide/AMP-alertmanager-receiver-AMPpermission.html)."""
    condition = _of_account(place, place.arn("aps", "workspace/*"))
    return _from("FromWorkspaces", "aps", ["sns:GetTopicAttributes", "sns:Publish"], topic, condition)


def _of_account(place: Place, arn: str) -> dict[str, Any]:
    return {"ArnLike": {"aws:SourceArn": arn}, "StringEquals": {"aws:SourceAccount": place.account}}
