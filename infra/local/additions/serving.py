"""New actions for moto, and the checks of a request's shape that every AWS service runs first.

A service checks the shape of a request against its own model: required members, ranges, lengths, patterns, enumerations.
The same model ships with botocore, whose client checks only a part of it, so this module runs all of them from that model.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult
from moto.core.utils import camelcase_to_underscores, get_service_model

LEFT_OUT = (
    "requests: patterns with Unicode property classes, those of tags, are not checked, since Python's do not know them; what "
    "EC2 and FSx list by additions of ours takes ids and names, and refuses Filters"
)

# moto's server has a thread per request and its stores have no locks, so each action holds this lock.
LOCK = threading.RLock()


@dataclass(frozen=True)
class Call:
    """A request: the caller's account, the region, and the input members under their names in the service's model."""

    account: str
    region: str
    partition: str
    params: dict[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.params.get(name)
        return default if value is None else value


Action = Callable[[Call], Mapping[str, Any]]


class Refusal(ServiceException):
    """A service error; the class is outside moto because moto looks up the error's model by the module of its class."""


def refuse(code: str, message: str, **details: str) -> NoReturn:
    """Raise a service error: `code` is its name in the service's model, `details` are its other members."""
    refusal = Refusal(code, message)
    for name, value in details.items():
        setattr(refusal, name, value)
    raise refusal


def serve(response: Any, service: str, actions: Mapping[str, Action], invalid: str = "ValidationException") -> None:
    """Let moto's `response` class answer `actions` (by their API names); a malformed request is refused as `invalid`."""
    for operation, action in actions.items():
        setattr(response, camelcase_to_underscores(operation), _method(service, operation, action, invalid))


def _method(service: str, operation: str, action: Action, invalid: str) -> Callable[[Any], ActionResult]:
    def answer(self: Any) -> ActionResult:
        self.parse_parameters(self.normalized_request)
        params = dict(self.params)
        errors = list(shape_errors(get_service_model(service).operation_model(operation).input_shape, params))
        if errors:
            plural = "s" if len(errors) > 1 else ""
            refuse(invalid, f"{len(errors)} validation error{plural} detected: {'; '.join(errors)}")
        if params.get("Filters"):
            refuse(invalid, f"The embedded AWS takes no Filters in {operation}: name what you look for.")
        with LOCK:
            return ActionResult(action(Call(self.current_account, self.region, self.partition, params)))

    return answer


def shape_errors(shape: Any, value: Any, path: str = "") -> Iterator[str]:
    """Yield the violations of a botocore shape's constraints in `value`, in the words of AWS services."""
    if shape is None or value is None:
        return
    if shape.type_name == "structure":
        yield from _structure_errors(shape, value, path)
    elif shape.type_name == "list":
        yield from _size_errors(shape, value, path)
        for number, item in enumerate(value, 1):
            yield from shape_errors(shape.member, item, f"{path}.{number}.member")
    elif shape.type_name == "map":
        yield from _size_errors(shape, value, path)
        for key, item in value.items():
            yield from shape_errors(shape.value, item, f"{path}.{key}.member")
    elif shape.type_name == "string":
        yield from _size_errors(shape, value, path)
        yield from _string_errors(shape, value, path)
    elif shape.type_name in ("integer", "long", "float", "double"):
        yield from _number_errors(shape, value, path)


def _structure_errors(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in shape.required_members:
        if value.get(name) is None:
            yield _error("null", _join(path, name), "Member must not be null")
    for name, member in shape.members.items():
        yield from shape_errors(member, value.get(name), _join(path, name))


def _size_errors(shape: Any, value: Any, path: str) -> Iterator[str]:
    minimum, maximum = shape.metadata.get("min"), shape.metadata.get("max")
    if minimum is not None and len(value) < minimum:
        yield _error(value, path, f"Member must have length greater than or equal to {minimum}")
    if maximum is not None and len(value) > maximum:
        yield _error(value, path, f"Member must have length less than or equal to {maximum}")


def _string_errors(shape: Any, value: str, path: str) -> Iterator[str]:
    pattern, allowed = shape.metadata.get("pattern"), shape.metadata.get("enum")
    if allowed and value not in allowed:
        yield _error(value, path, f"Member must satisfy enum value set: [{', '.join(allowed)}]")
    if pattern and (regex := _compile(pattern)) and not regex.fullmatch(value):
        yield _error(value, path, f"Member must satisfy regular expression pattern: {pattern}")


@cache
def _compile(pattern: str) -> re.Pattern[str] | None:
    """Compile a pattern; None for Java syntax that Python lacks: Unicode properties, flags in the middle.

    EC2's model has a start-of-text anchor in the middle of a pattern, which no text could match.
    """
    try:
        return re.compile(pattern.replace("/^", "/"))
    except re.error:
        return None


def _number_errors(shape: Any, value: float, path: str) -> Iterator[str]:
    minimum, maximum = shape.metadata.get("min"), shape.metadata.get("max")
    if minimum is not None and value < minimum:
        yield _error(value, path, f"Member must have value greater than or equal to {minimum}")
    if maximum is not None and value > maximum:
        yield _error(value, path, f"Member must have value less than or equal to {maximum}")


def _error(value: Any, path: str, rule: str) -> str:
    quoted = "null" if value == "null" else f"'{value}'"
    return f"Value {quoted} at '{path}' failed to satisfy constraint: {rule}"


def _join(path: str, name: str) -> str:
    name = name[0].lower() + name[1:]
    return f"{path}.{name}" if path else name
