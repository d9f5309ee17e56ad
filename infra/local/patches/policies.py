"""Evaluation of the resource policies of buckets, queues and topics for a request.

This covers a part of IAM's grammar: statements with Effect, Principal, Action, Resource and the condition operators below;
any other condition does not hold. https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda value, expected: value == expected,
    "StringLike": fnmatchcase,
    "ArnEquals": fnmatchcase,
    "ArnLike": fnmatchcase,
    "Bool": lambda value, expected: value.lower() == expected.lower(),
}


_NEGATED = {"StringNotEquals": "StringEquals", "StringNotLike": "StringLike", "ArnNotEquals": "ArnEquals"}
"""A negated operator holds where its counterpart does not, also when the request has no such key."""


def allows(
    policy: Mapping[str, Any] | None, service: str, action: str, resource: str, context: Mapping[str, str]
) -> bool:
    """Whether the policy allows, and does not deny, `service` (events.amazonaws.com) to do `action` on `resource`."""
    statements = [
        statement
        for statement in _as_list((policy or {}).get("Statement"))
        if _names_principal(statement.get("Principal"), service)
        and any(fnmatchcase(action.lower(), str(pattern).lower()) for pattern in _as_list(statement.get("Action")))
        and any(fnmatchcase(resource, str(pattern)) for pattern in _as_list(statement.get("Resource", "*")))
        and conditions_hold(statement, context)
    ]
    effects = {statement.get("Effect") for statement in statements}
    return "Allow" in effects and "Deny" not in effects


def conditions_hold(statement: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    """Whether the statement's conditions hold for a request with this context (keys as in policies, any case)."""
    values = {key.lower(): value for key, value in context.items()}
    for operator, tests in (statement.get("Condition") or {}).items():
        compare = _OPERATORS.get(_NEGATED.get(operator, operator))
        for key, expected in tests.items():
            value = values.get(key.lower())
            matches = (
                compare
                and value is not None
                and any(compare(value, str(candidate)) for candidate in _as_list(expected))
            )
            if compare is None or bool(matches) == (operator in _NEGATED):
                return False
    return True


def _names_principal(principal: Any, service: str) -> bool:
    if principal == "*":
        return True
    principals = [*_as_list((principal or {}).get("Service")), *_as_list((principal or {}).get("AWS"))]
    return service in principals or "*" in principals


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
