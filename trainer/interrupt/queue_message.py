"""What a message of the interruption queue says: an event of AWS, as EventBridge delivers it, becomes plain data. Pure.

The events are those that the stack's rules pass (`infra/plan/watch/interruptions.py`); `lustrain/capacity_events.py` names the
pages that show them. The end of a capacity block names no instance: `interrupt.deadline` is for that.
"""

from __future__ import annotations

import email.utils
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lustrain import capacity_events
from trainer.config import parse_time

WARNING_S = 120.0
"""Between the warning about a spot instance, or one in an interruptible reservation, and its end."""
STALE_S = 600.0
"""An older event is about a machine that is gone, or that stayed after all. `launch` leaves a node out for as long."""
SOON_S = 600.0
"""A change that is scheduled for later is for people to plan: AWS Health says it by mail, days before. It becomes a notice so
long before it where its message is still in the queue then."""
LONGEST_DETAIL = 200


@dataclass(frozen=True)
class NodeEvent:
    """An event that takes instances away; times are Unix seconds."""

    source: str
    """One of `capacity_events.NODE_SOURCES`."""
    detail: str
    instances: tuple[str, ...]
    sent: float
    ends: float | None = None
    """None where the event does not say when."""


def parse_message(body: str) -> NodeEvent | None:
    """Return what a message's body announces; None where it takes no instance away, or is no event that is known here."""
    try:
        event = json.loads(body)
        read = _READERS.get(event["detail-type"])
        return read(event["detail"], parse_time(event["time"])) if read else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def needs_action(event: NodeEvent, now: float, started: float, *, rebalance: bool) -> bool:
    """Whether a run that began to read at `started` has to save and stop because of an event about its node.

    A rebalance recommendation of before stays for as long as the instance does, as in the instance metadata.
    """
    if event.source == "rebalance" and (not rebalance or event.sent < started):
        return False
    if event.source == "scheduled":
        # AWS Health sends an event again when it changes, also during the change and after it.
        return event.ends is not None and event.ends - SOON_S < now < event.ends + STALE_S
    return now - event.sent < STALE_S


def _spot(detail: Mapping[str, Any], sent: float) -> NodeEvent:
    return NodeEvent("spot", _line(detail["instance-action"]), (str(detail["instance-id"]),), sent, sent + WARNING_S)


def _rebalance(detail: Mapping[str, Any], sent: float) -> NodeEvent:
    return NodeEvent("rebalance", "recommended", (str(detail["instance-id"]),), sent)


def _terminate(detail: Mapping[str, Any], sent: float) -> NodeEvent:
    group = _line(detail["AutoScalingGroupName"])
    return NodeEvent("autoscaling", f"{group} ends it", (str(detail["EC2InstanceId"]),), sent)


def _reservation(detail: Mapping[str, Any], sent: float) -> NodeEvent:
    action, ends = _line(detail.get("instance-action", "terminate")), detail.get("instance-termination-time")
    when = sent + WARNING_S if ends is None else parse_time(ends)
    return NodeEvent("reservation", action, (str(detail["instance-id"]),), sent, when)


def _scheduled(detail: Mapping[str, Any], sent: float) -> NodeEvent | None:
    """https://docs.aws.amazon.com/health/latest/ug/aws-health-events-eventbridge-schema.html: times are those of RFC 1123,
    and an event that is over, or was called off, comes once more as `closed`."""
    if detail["eventTypeCategory"] != "scheduledChange" or detail.get("statusCode") == "closed":
        return None
    names = tuple(str(entity["entityValue"]) for entity in detail["affectedEntities"])
    return NodeEvent(
        "scheduled",
        _line(detail["eventTypeCode"]),
        names,
        sent,
        email.utils.parsedate_to_datetime(detail["startTime"]).timestamp(),
    )


def _node_health(detail: Mapping[str, Any], sent: float) -> NodeEvent | None:
    """https://docs.aws.amazon.com/sagemaker/latest/dg/automating-sagemaker-with-eventbridge.html"""
    health = detail["HealthSummary"]
    if health["HealthStatus"] != "Unhealthy":
        return None
    return NodeEvent("hyperpod", _line(health["HealthStatusReason"]), (str(detail["InstanceId"]),), sent)


def _line(text: object) -> str:
    """Return what fits into one line of a log."""
    return " ".join(str(text).split())[:LONGEST_DETAIL]


_READERS: dict[str, Callable[[Mapping[str, Any], float], NodeEvent | None]] = {
    capacity_events.SPOT: _spot,
    capacity_events.REBALANCE: _rebalance,
    capacity_events.TERMINATE: _terminate,
    **dict.fromkeys(capacity_events.RESERVATION_INTERRUPTION, _reservation),
    capacity_events.HEALTH: _scheduled,
    capacity_events.HYPERPOD_NODE: _node_health,
}
