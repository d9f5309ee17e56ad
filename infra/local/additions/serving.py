"""New actions for moto, and the checks that every AWS service makes of a request first.

A service checks the shape of a request against its own model: required members, ranges, lengths, patterns, enumerations.
The same model ships with botocore, whose client checks only a part of it, so the checks are made here from that model.
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

LEFT_OUT = "requests: patterns with Unicode property classes, those of tags, are not checked; Python's do not know them"

# moto's server has a thread per request and its stores have no locks; what follows reads, decides and writes as one.
LOCK = threading.RLock()


@dataclass(frozen=True)
class Call:
    """One request: who asks, where, and the members of the input as the service's model names them."""

    account: str
    region: str
    partition: str
    params: dict[str, Any]

    def get(self, name: str, otherwise: Any = None) -> Any:
        value = self.params.get(name)
        return otherwise if value is None else value


Action = Callable[[Call], Mapping[str, Any]]


class Refusal(ServiceException):
    """moto's own exception looks for its error's model in the module of its class, which must be outside moto then."""


def refuse(code: str, message: str, **details: str) -> NoReturn:
    """Answer as the service does when it refuses: `code` is the error's name in its model, `details` its other members."""
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
        found = list(broken(get_service_model(service).operation_model(operation).input_shape, params))
        if found:
            plural = "s" if len(found) > 1 else ""
            refuse(invalid, f"{len(found)} validation error{plural} detected: {'; '.join(found)}")
        with LOCK:
            return ActionResult(action(Call(self.current_account, self.region, self.partition, params)))

    return answer


def broken(shape: Any, value: Any, path: str = "") -> Iterator[str]:
    """Yield what `value` breaks of the constraints of a botocore shape, in the words that AWS services use."""
    if shape is None or value is None:
        return
    if shape.type_name == "structure":
        yield from _broken_structure(shape, value, path)
    elif shape.type_name == "list":
        yield from _broken_size(shape, value, path)
        for number, item in enumerate(value, 1):
            yield from broken(shape.member, item, f"{path}.{number}.member")
    elif shape.type_name == "map":
        yield from _broken_size(shape, value, path)
        for key, item in value.items():
            yield from broken(shape.value, item, f"{path}.{key}.member")
    elif shape.type_name == "string":
        yield from _broken_size(shape, value, path)
        yield from _broken_string(shape, value, path)
    elif shape.type_name in ("integer", "long", "float", "double"):
        yield from _broken_number(shape, value, path)


def _broken_structure(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in shape.required_members:
        if value.get(name) is None:
            yield _fails("null", _join(path, name), "Member must not be null")
    for name, member in shape.members.items():
        yield from broken(member, value.get(name), _join(path, name))


def _broken_size(shape: Any, value: Any, path: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and len(value) < least:
        yield _fails(value, path, f"Member must have length greater than or equal to {least}")
    if most is not None and len(value) > most:
        yield _fails(value, path, f"Member must have length less than or equal to {most}")


def _broken_string(shape: Any, value: str, path: str) -> Iterator[str]:
    pattern, allowed = shape.metadata.get("pattern"), shape.metadata.get("enum")
    if allowed and value not in allowed:
        yield _fails(value, path, f"Member must satisfy enum value set: [{', '.join(allowed)}]")
    if pattern and (known := _compiled(pattern)) and not known.fullmatch(value):
        yield _fails(value, path, f"Member must satisfy regular expression pattern: {pattern}")


@cache
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """None for what Java's regular expressions know and Python's do not: Unicode properties, flags in the middle.

    EC2's model has a start-of-text in the middle of a pattern, which nothing could match.
    """
    try:
        return re.compile(pattern.replace("/^", "/"))
    except re.error:
        return None


def _broken_number(shape: Any, value: float, path: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and value < least:
        yield _fails(value, path, f"Member must have value greater than or equal to {least}")
    if most is not None and value > most:
        yield _fails(value, path, f"Member must have value less than or equal to {most}")


def _fails(value: Any, path: str, rule: str) -> str:
    shown = "null" if value == "null" else f"'{value}'"
    return f"Value {shown} at '{path}' failed to satisfy constraint: {rule}"


def _join(path: str, name: str) -> str:
    name = name[0].lower() + name[1:]
    return f"{path}.{name}" if path else name
