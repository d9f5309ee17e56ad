"""AWS Budgets: updates, subscribers and tags, which moto lacks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from moto.budgets.models import Budget, budgets_backends
from moto.budgets.responses import BudgetsResponse

from infra.local.additions.serving import Call, refuse, serve
from infra.local.patches.wrapping import around, get_or_create

LEFT_OUT = (
    "budgets: nothing is spent, so no notification is ever sent; notifications and subscribers are taken as they come"
)
_MALFORMED = "InvalidParameterException"


@cache
def install() -> None:
    """Add the actions, and store the tags of a new budget."""

    @around(BudgetsResponse, "create_budget")
    def _create(original: Any, self: Any) -> Any:
        answer = original(self)
        budget = self._get_param("Budget")["BudgetName"]
        arn = f"arn:{self.partition}:budgets::{self.current_account}:budget/{budget}"
        _tags_by_arn(self.backend)[arn] = {tag["Key"]: tag["Value"] for tag in self._get_param("ResourceTags", [])}
        return answer

    actions = {
        "UpdateBudget": _update,
        "DescribeSubscribersForNotification": _list_subscribers,
        "ListTagsForResource": _list_tags,
        "TagResource": _tag,
        "UntagResource": _untag,
    }
    serve(BudgetsResponse, "budgets", actions, _MALFORMED)


def _tags_by_arn(backend: Any) -> dict[str, dict[str, str]]:
    tags: dict[str, dict[str, str]] = get_or_create(backend, "lustrain_tags", dict)
    return tags


def _get_budget(call: Call, name: str) -> Any:
    budget = budgets_backends[call.account][call.partition].budgets[call.get("AccountId")].get(name)
    if budget is None:
        refuse("NotFoundException", f"Unable to get budget: {name} - the budget doesn't exist.")
    return budget


def _identity(details: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a notification."""
    threshold = float(details["Threshold"])
    kind = details.get("ThresholdType") or "PERCENTAGE"
    return details["NotificationType"], details["ComparisonOperator"], threshold, kind


def _update(call: Call) -> Mapping[str, Any]:
    changes = call.get("NewBudget")
    budget = _get_budget(call, changes["BudgetName"])
    period = changes.get("TimePeriod") or {}
    # moto stores timestamps in seconds, as JSON requests carry them.
    seconds = {name: value.timestamp() if isinstance(value, datetime) else value for name, value in period.items()}
    updated = Budget({**changes, "TimePeriod": {**budget.budget["TimePeriod"], **seconds}}, [])
    budget.budget = updated.budget
    return {}


def _list_subscribers(call: Call) -> Mapping[str, Any]:
    identity = _identity(call.get("Notification"))
    notifications = _get_budget(call, call.get("BudgetName")).notifications
    found = [one.subscribers for one in notifications if _identity(one.details) == identity]
    if not found:
        refuse("NotFoundException", "Unable to find notification - the notification doesn't exist.")
    return {"Subscribers": found[0]}


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
