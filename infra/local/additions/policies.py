"""Resource policies of buckets, queues and topics, judged with what one request brings along.

IAM's grammar in part: statements with Effect, Principal, Action, Resource and the condition operators below; a condition
that is not known here is not met. https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda value, wanted: value == wanted,
    "StringLike": fnmatchcase,
    "ArnEquals": fnmatchcase,
    "ArnLike": fnmatchcase,
    "Bool": lambda value, wanted: value.lower() == wanted.lower(),
}


_NEGATED = {"StringNotEquals": "StringEquals", "StringNotLike": "StringLike", "ArnNotEquals": "ArnEquals"}
"""Met where the other is not, also where the request brings no such key."""


def allows(
    policy: Mapping[str, Any] | None, service: str, action: str, resource: str, context: Mapping[str, str]
) -> bool:
    """Whether the policy lets `service` (events.amazonaws.com) do `action` on `resource`: allowed and not denied."""
    statements = [
        item
        for item in _many((policy or {}).get("Statement"))
        if _principal(item.get("Principal"), service)
        and any(fnmatchcase(action.lower(), str(wanted).lower()) for wanted in _many(item.get("Action")))
        and any(fnmatchcase(resource, str(wanted)) for wanted in _many(item.get("Resource", "*")))
        and met(item, context)
    ]
    effects = {statement.get("Effect") for statement in statements}
    return "Allow" in effects and "Deny" not in effects


def met(statement: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    """Whether the statement's conditions hold for a request with this context (keys as in policies, any case)."""
    known = {key.lower(): value for key, value in context.items()}
    for operator, tests in (statement.get("Condition") or {}).items():
        compare = _OPERATORS.get(_NEGATED.get(operator, operator))
        for key, wanted in tests.items():
            value = known.get(key.lower())
            fits = compare and value is not None and any(compare(value, str(item)) for item in _many(wanted))
            if compare is None or bool(fits) == (operator in _NEGATED):
                return False
    return True


def _principal(principal: Any, service: str) -> bool:
    if principal == "*":
        return True
    named = [*_many((principal or {}).get("Service")), *_many((principal or {}).get("AWS"))]
    return service in named or "*" in named


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
