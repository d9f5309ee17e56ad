"""AWS Budgets: updates, subscribers and tags, which moto lacks; rules as in the API reference of Budgets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from moto.budgets.models import Budget, Notification, budgets_backends
from moto.budgets.responses import BudgetsResponse

from infra.local.additions.serving import Call, refuse, serve
from infra.local.additions.wrapping import around, get_or_create

LEFT_OUT = "budgets: nothing is spent, so no notification is ever sent; subscribers change with their notification only"
MAX_EMAILS = 10
"""https://docs.aws.amazon.com/cost-management/latest/userguide/management-limits.html (the limit is one for SNS topics)."""
_MALFORMED = "InvalidParameterException"


@cache
def install() -> None:
    """Add the actions, and store the tags of a new budget."""

    @around(BudgetsResponse, "create_budget")
    def _create(original: Any, self: Any) -> Any:
        for notification in self._get_param("NotificationsWithSubscribers", []):
            _check_subscribers(notification.get("Subscribers", []))
        answer = original(self)
        budget = self._get_param("Budget")["BudgetName"]
        arn = f"arn:{self.partition}:budgets::{self.current_account}:budget/{budget}"
        _tags_by_arn(self.backend)[arn] = {tag["Key"]: tag["Value"] for tag in self._get_param("ResourceTags", [])}
        return answer

    actions = {
        "UpdateBudget": _update,
        "CreateNotification": _create_notification,
        "DeleteNotification": _delete_notification,
        "DescribeNotificationsForBudget": _list_notifications,
        "DescribeSubscribersForNotification": _list_subscribers,
        "ListTagsForResource": _list_tags,
        "TagResource": _tag,
        "UntagResource": _untag,
    }
    serve(BudgetsResponse, "budgets", actions, _MALFORMED)


def _tags_by_arn(backend: Any) -> dict[str, dict[str, str]]:
    tags: dict[str, dict[str, str]] = get_or_create(backend, "lustrain_tags", dict)
    return tags


def _get_budget(call: Call, name: str | None = None) -> Any:
    budget_name = name or call.get("BudgetName")
    budget = budgets_backends[call.account][call.partition].budgets[call.get("AccountId")].get(budget_name)
    if budget is None:
        refuse("NotFoundException", f"Unable to get budget: {budget_name} - the budget doesn't exist.")
    return budget


def _identity(details: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a notification."""
    threshold = float(details["Threshold"])
    kind = details.get("ThresholdType") or "PERCENTAGE"
    return details["NotificationType"], details["ComparisonOperator"], threshold, kind


def _get_notification(call: Call) -> Any:
    identity = _identity(call.get("Notification"))
    notification = next(
        (candidate for candidate in _get_budget(call).notifications if _identity(candidate.details) == identity), None
    )
    if notification is None:
        refuse("NotFoundException", "Unable to find notification - the notification doesn't exist.")
    return notification


def _check_subscribers(subscribers: Any) -> None:
    emails = [subscriber["Address"] for subscriber in subscribers if subscriber["SubscriptionType"] == "EMAIL"]
    topics = [subscriber["Address"] for subscriber in subscribers if subscriber["SubscriptionType"] == "SNS"]
    if not subscribers or len(emails) > MAX_EMAILS or len(topics) > 1:
        refuse(
            _MALFORMED, "A notification takes up to 10 email addresses and one SNS topic, and at least one subscriber."
        )
    for address in emails:
        if address.count("@") != 1:
            refuse(_MALFORMED, f"Invalid email address: {address}")


def _update(call: Call) -> Mapping[str, Any]:
    changes = call.get("NewBudget")
    budget = _get_budget(call, changes["BudgetName"])
    period = changes.get("TimePeriod") or {}
    # moto stores timestamps in seconds, as JSON requests carry them.
    seconds = {name: value.timestamp() if isinstance(value, datetime) else value for name, value in period.items()}
    updated = Budget({**changes, "TimePeriod": {**budget.budget["TimePeriod"], **seconds}}, [])
    budget.budget = updated.budget
    return {}


def _create_notification(call: Call) -> Mapping[str, Any]:
    budget, notification = _get_budget(call), call.get("Notification")
    _check_subscribers(call.get("Subscribers"))
    if any(_identity(existing.details) == _identity(notification) for existing in budget.notifications):
        refuse("DuplicateRecordException", "Unable to create notification - the notification already exists.")
    details = {"ThresholdType": "PERCENTAGE", "NotificationState": "OK", **notification}
    budget.notifications.append(Notification(details, call.get("Subscribers")))
    return {}


def _delete_notification(call: Call) -> Mapping[str, Any]:
    _get_budget(call).notifications.remove(_get_notification(call))
    return {}


def _list_notifications(call: Call) -> Mapping[str, Any]:
    return {"Notifications": [notification.details for notification in _get_budget(call).notifications]}


def _list_subscribers(call: Call) -> Mapping[str, Any]:
    return {"Subscribers": _get_notification(call).subscribers}


def _list_tags(call: Call) -> Mapping[str, Any]:
    tags = _tags_by_arn(budgets_backends[call.account][call.partition]).get(call.get("ResourceARN"), {})
    return {"ResourceTags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _tag(call: Call) -> Mapping[str, Any]:
    tags = _tags_by_arn(budgets_backends[call.account][call.partition]).setdefault(call.get("ResourceARN"), {})
    tags |= {tag["Key"]: tag["Value"] for tag in call.get("ResourceTags")}
    return {}


def _untag(call: Call) -> Mapping[str, Any]:
    tags = _tags_by_arn(budgets_backends[call.account][call.partition]).get(call.get("ResourceARN"), {})
    for key in call.get("ResourceTagKeys"):
        tags.pop(key, None)
    return {}
