"""EventBridge delivers to queues and topics as the service does: whole events, enabled rules, and only where it may.

moto leaves the account out of the event, sends to disabled rules, knows no topics, lets a rule without a pattern match
everything, and asks no policy. Here a target whose policy does not let the rule write gets nothing; the event goes to the
target's dead-letter queue, if that one may be written to, and to the list of `undelivered`.
https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-use-resource-based.html and eb-rule-dlq.html beside it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from moto.core.exceptions import ServiceException
from moto.events.models import Rule, events_backends
from moto.events.responses import EventsHandler
from moto.sns.models import sns_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.local.additions.policies import allows
from infra.local.additions.wrapping import around, kept_by

LEFT_OUT = (
    "EventBridge: one try for each event, no schedules, no InputPath, no InputTransformer; the policies of queues and topics "
    "are judged"
)
SERVICE = "events.amazonaws.com"
_WRITES = {"sqs": "sqs:SendMessage", "sns": "sns:Publish"}


@cache
def install() -> None:
    """Put itself around rules, and refuses events that pretend to come from AWS."""

    @around(Rule, "send_to_targets")
    def _send(original: Any, self: Any, event: Any, transform_input: bool = True) -> None:
        if (
            self.state == "DISABLED"
            or not self.event_pattern.get_pattern()
            or not self.event_pattern.matches_event(event)
        ):
            return
        ours = [target for target in self.targets if parse_arn(target["Arn"]).service in _WRITES]
        for target in ours:
            _deliver(self, target, event)
        if len(ours) < len(self.targets):
            rest = copy.copy(self)
            rest.targets = [target for target in self.targets if target not in ours]
            original(rest, event, transform_input)

    @around(EventsHandler, "put_events")
    def _put(original: Any, self: Any) -> str:
        entries = self._get_param("Entries")
        refused = [str(entry.get("Source") or "").startswith("aws.") for entry in entries]
        allowed = [one for one, no in zip(entries, refused, strict=True) if not no]
        answers = iter(self.events_backend.put_events(allowed))
        no_source = {"ErrorCode": "NotAuthorizedForSourceException", "ErrorMessage": "Not authorized for the source."}
        shown = [no_source if no else next(answers) for no in refused]
        return json.dumps({"FailedEntryCount": sum("ErrorCode" in item for item in shown), "Entries": shown})


def put_service_event(
    account: str, region: str, source: str, kind: str, detail: Mapping[str, Any], resources: Sequence[str]
) -> None:
    """Put an event of an AWS service on the account's default bus, which no user may."""
    event = {"Source": source, "DetailType": kind, "Detail": json.dumps(detail), "Resources": list(resources)}
    events_backends[account][region].put_events([event])


def undelivered(account: str, region: str) -> list[dict[str, str]]:
    """Return the events that matched a rule and were not delivered, with the reason."""
    found: list[dict[str, str]] = kept_by(events_backends[account][region], "lustrain_undelivered", list)
    return found


def _deliver(rule: Any, target: Mapping[str, Any], event: Mapping[str, Any]) -> None:
    body = _body(target, event)
    try:
        _write(rule, target["Arn"], body, target)
        return
    except (PermissionError, ServiceException, KeyError) as error:
        why = str(error) or type(error).__name__
    undelivered(rule.account_id, rule.region_name).append({"rule": rule.name, "target": target["Arn"], "why": why})
    dead_letters = (target.get("DeadLetterConfig") or {}).get("Arn")
    if not dead_letters:
        return
    facts = {"RULE_ARN": rule.arn, "TARGET_ARN": target["Arn"], "ERROR_CODE": "NO_PERMISSIONS", "ERROR_MESSAGE": why}
    attributes = {name: {"DataType": "String", "StringValue": value} for name, value in facts.items()}
    try:
        _write(rule, dead_letters, body, {}, attributes)
    except (PermissionError, ServiceException, KeyError) as error:
        undelivered(rule.account_id, rule.region_name).append(
            {"rule": rule.name, "target": dead_letters, "why": str(error) or type(error).__name__}
        )


def _write(
    rule: Any, arn: str, body: str, target: Mapping[str, Any], attributes: Mapping[str, Any] | None = None
) -> None:
    """PermissionError when the policy of the queue or topic does not let the rule write."""
    to = parse_arn(arn)
    queues = sqs_backends[to.account][to.region]
    holder: Any = (
        queues.get_queue(to.resource_id) if to.service == "sqs" else sns_backends[to.account][to.region].get_topic(arn)
    )
    context = {"aws:SourceArn": rule.arn, "aws:SourceAccount": rule.account_id, "aws:SecureTransport": "true"}
    if not target.get("RoleArn") and not allows(holder._policy_json, SERVICE, _WRITES[to.service], arn, context):
        raise PermissionError(f"the policy of {arn} does not let {SERVICE} do {_WRITES[to.service]} for {rule.arn}")
    if to.service == "sns":
        holder.publish(body)
        return
    group = (target.get("SqsParameters") or {}).get("MessageGroupId")
    queues.send_message(to.resource_id, body, message_attributes=dict(attributes or {}), group_id=group)


def _body(target: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    if target.get("Input"):
        return str(target["Input"])
    shown: dict[str, Any] = {name: value for name, value in event.items() if name != "ingestion-time"}
    if not isinstance(shown.get("time"), str):
        shown["time"] = datetime.fromtimestamp(float(shown["time"]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps(shown, separators=(",", ":"))
