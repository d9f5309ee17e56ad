"""EventBridge's delivery to queues and topics: by enabled rules only, and as the policies of the targets allow.

moto delivers for disabled rules, supports no topics, lets a rule without a pattern match everything, and checks no policy; no
issue is known. Here a target whose policy denies the rule gets nothing; the event goes to the target's dead-letter queue, if
its policy allows that, and to the list of `undelivered`.
https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-use-resource-based.html and eb-rule-dlq.html beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from moto.core.exceptions import ServiceException
from moto.events.models import Rule, events_backends
from moto.sns.models import sns_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.local.patches.policies import allows
from infra.local.patches.wrapping import around, get_or_create

LEFT_OUT = (
    "EventBridge: to queues and topics only, whose policies are judged; one try for each event, no schedules, no input of a "
    "target's own; users may put events of AWS's services"
)
SERVICE = "events.amazonaws.com"
_WRITES = {"sqs": "sqs:SendMessage", "sns": "sns:Publish"}


@cache
def install() -> None:
    """Replace the delivery of rules."""

    @around(Rule, "send_to_targets")
    def _send(original: Any, self: Any, event: Any, transform_input: bool = True) -> None:
        if (
            self.state == "DISABLED"
            or not self.event_pattern.get_pattern()
            or not self.event_pattern.matches_event(event)
        ):
            return
        for target in self.targets:
            if parse_arn(target["Arn"]).service in _WRITES:
                _deliver(self, target, event)


def put_service_event(
    account: str, region: str, source: str, kind: str, detail: Mapping[str, Any], resources: Sequence[str]
) -> None:
    """Put an event of an AWS service on the account's default bus."""
    event = {"Source": source, "DetailType": kind, "Detail": json.dumps(detail), "Resources": list(resources)}
    events_backends[account][region].put_events([event])


def undelivered(account: str, region: str) -> list[dict[str, str]]:
    """Return the events that matched a rule and were not delivered, with the reason."""
    events: list[dict[str, str]] = get_or_create(events_backends[account][region], "lustrain_undelivered", list)
    return events


def _deliver(rule: Any, target: Mapping[str, Any], event: Mapping[str, Any]) -> None:
    body = _body(event)
    try:
        _write(rule, target["Arn"], body)
        return
    except (PermissionError, ServiceException, KeyError) as error:
        reason = str(error) or type(error).__name__
    undelivered(rule.account_id, rule.region_name).append({"rule": rule.name, "target": target["Arn"], "why": reason})
    dead_letters = (target.get("DeadLetterConfig") or {}).get("Arn")
    if not dead_letters:
        return
    failure = {
        "RULE_ARN": rule.arn,
        "TARGET_ARN": target["Arn"],
        "ERROR_CODE": "NO_PERMISSIONS",
        "ERROR_MESSAGE": reason,
    }
    attributes = {name: {"DataType": "String", "StringValue": value} for name, value in failure.items()}
    try:
        _write(rule, dead_letters, body, attributes)
    except (PermissionError, ServiceException, KeyError) as error:
        undelivered(rule.account_id, rule.region_name).append(
            {"rule": rule.name, "target": dead_letters, "why": str(error) or type(error).__name__}
        )


def _write(rule: Any, arn: str, body: str, attributes: Mapping[str, Any] | None = None) -> None:
    """Write an event to a queue or topic; PermissionError when its policy does not let the rule write."""
    address = parse_arn(arn)
    queues = sqs_backends[address.account][address.region]
    destination: Any = (
        queues.get_queue(address.resource_id)
        if address.service == "sqs"
        else sns_backends[address.account][address.region].get_topic(arn)
    )
    context = {"aws:SourceArn": rule.arn, "aws:SourceAccount": rule.account_id, "aws:SecureTransport": "true"}
    if not allows(destination._policy_json, SERVICE, _WRITES[address.service], arn, context):
        raise PermissionError(
            f"the policy of {arn} does not let {SERVICE} do {_WRITES[address.service]} for {rule.arn}"
        )
    if address.service == "sns":
        destination.publish(body)
        return
    queues.send_message(address.resource_id, body, message_attributes=dict(attributes or {}))


def _body(event: Mapping[str, Any]) -> str:
    visible: dict[str, Any] = {name: value for name, value in event.items() if name != "ingestion-time"}
    if not isinstance(visible.get("time"), str):
        visible["time"] = datetime.fromtimestamp(float(visible["time"]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps(visible, separators=(",", ":"))
