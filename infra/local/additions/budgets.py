"""AWS Budgets: updates, subscribers and tags, which moto lacks; rules as in the API reference of Budgets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from moto.budgets.models import Budget, Notification, budgets_backends
from moto.budgets.responses import BudgetsResponse

from infra.local.additions.serving import Call, refuse, serve
from infra.local.additions.wrapping import around, kept_by

LEFT_OUT = "budgets: nothing is spent, so no notification is ever sent; subscribers change with their notification only"
MOST_EMAILS = 10
"""https://docs.aws.amazon.com/cost-management/latest/userguide/management-limits.html; and one SNS topic."""
_MALFORMED = "InvalidParameterException"


@cache
def install() -> None:
    """Add the actions, and keeps the tags that a new budget comes with."""

    @around(BudgetsResponse, "create_budget")
    def _create(original: Any, self: Any) -> Any:
        for one in self._get_param("NotificationsWithSubscribers", []):
            _check_subscribers(one.get("Subscribers", []))
        answer = original(self)
        budget = self._get_param("Budget")["BudgetName"]
        arn = f"arn:{self.partition}:budgets::{self.current_account}:budget/{budget}"
        _tags(self.backend)[arn] = {tag["Key"]: tag["Value"] for tag in self._get_param("ResourceTags", [])}
        return answer

    actions = {
        "UpdateBudget": _update,
        "CreateNotification": _create_notification,
        "DeleteNotification": _delete_notification,
        "DescribeNotificationsForBudget": _notifications,
        "DescribeSubscribersForNotification": _subscribers,
        "ListTagsForResource": _list_tags,
        "TagResource": _tag,
        "UntagResource": _untag,
    }
    serve(BudgetsResponse, "budgets", actions, _MALFORMED)


def _tags(backend: Any) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = kept_by(backend, "lustrain_tags", dict)
    return found


def _budget(call: Call, name: str | None = None) -> Any:
    wanted = name or call.get("BudgetName")
    found = budgets_backends[call.account][call.partition].budgets[call.get("AccountId")].get(wanted)
    if found is None:
        refuse("NotFoundException", f"Unable to get budget: {wanted} - the budget doesn't exist.")
    return found


def _same(details: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a notification."""
    threshold = float(details["Threshold"])
    kind = details.get("ThresholdType") or "PERCENTAGE"
    return details["NotificationType"], details["ComparisonOperator"], threshold, kind


def _notification(call: Call) -> Any:
    wanted = _same(call.get("Notification"))
    found = next((one for one in _budget(call).notifications if _same(one.details) == wanted), None)
    if found is None:
        refuse("NotFoundException", "Unable to find notification - the notification doesn't exist.")
    return found


def _check_subscribers(subscribers: Any) -> None:
    emails = [one["Address"] for one in subscribers if one["SubscriptionType"] == "EMAIL"]
    topics = [one["Address"] for one in subscribers if one["SubscriptionType"] == "SNS"]
    if not subscribers or len(emails) > MOST_EMAILS or len(topics) > 1:
        refuse(
            _MALFORMED, "A notification takes up to 10 email addresses and one SNS topic, and at least one subscriber."
        )
    for address in emails:
        if address.count("@") != 1:
            refuse(_MALFORMED, f"Invalid email address: {address}")


def _update(call: Call) -> Mapping[str, Any]:
    new = call.get("NewBudget")
    found = _budget(call, new["BudgetName"])
    period = new.get("TimePeriod") or {}
    # moto keeps moments as JSON sends them, in seconds.
    seconds = {name: value.timestamp() if isinstance(value, datetime) else value for name, value in period.items()}
    checked = Budget({**new, "TimePeriod": {**found.budget["TimePeriod"], **seconds}}, [])
    found.budget = checked.budget
    return {}


def _create_notification(call: Call) -> Mapping[str, Any]:
    found, new = _budget(call), call.get("Notification")
    _check_subscribers(call.get("Subscribers"))
    if any(_same(one.details) == _same(new) for one in found.notifications):
        refuse("DuplicateRecordException", "Unable to create notification - the notification already exists.")
    details = {"ThresholdType": "PERCENTAGE", "NotificationState": "OK", **new}
    found.notifications.append(Notification(details, call.get("Subscribers")))
    return {}


def _delete_notification(call: Call) -> Mapping[str, Any]:
    _budget(call).notifications.remove(_notification(call))
    return {}


def _notifications(call: Call) -> Mapping[str, Any]:
    return {"Notifications": [one.details for one in _budget(call).notifications]}


def _subscribers(call: Call) -> Mapping[str, Any]:
    return {"Subscribers": _notification(call).subscribers}


def _list_tags(call: Call) -> Mapping[str, Any]:
    tags = _tags(budgets_backends[call.account][call.partition]).get(call.get("ResourceARN"), {})
    return {"ResourceTags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _tag(call: Call) -> Mapping[str, Any]:
    tags = _tags(budgets_backends[call.account][call.partition]).setdefault(call.get("ResourceARN"), {})
    tags |= {tag["Key"]: tag["Value"] for tag in call.get("ResourceTags")}
    return {}


def _untag(call: Call) -> Mapping[str, Any]:
    tags = _tags(budgets_backends[call.account][call.partition]).get(call.get("ResourceARN"), {})
    for key in call.get("ResourceTagKeys"):
        tags.pop(key, None)
    return {}
