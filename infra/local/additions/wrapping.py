"""Wrappers around actions that moto has; new actions go through `serving.serve`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


def around(owner: Any, name: str) -> Callable[[Method], Method]:
    """Put the decorated function in the place of `owner.name`; its first argument is what stood there."""
    original = getattr(owner, name)

    def put(function: Method) -> Method:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, method)
        return function

    return put


def kept_by(backend: Any, name: str, make: Callable[[], Any]) -> Any:
    """Return what an addition remembers beside a backend of moto or a thing in it, so that a reset of moto forgets it as
    well."""
    if name not in backend.__dict__:
        backend.__dict__[name] = make()
    return backend.__dict__[name]


def filtered(shown: list[dict[str, Any]], filters: list[dict[str, Any]], keys: dict[str, str]) -> list[dict[str, Any]]:
    """Those of `shown` that pass a Describe call's filters; `keys` says which member each filter looks at."""

    def value(one: dict[str, Any], name: str) -> Any:
        if name.startswith("tag:"):
            return {tag["Key"]: tag["Value"] for tag in one["Tags"]}.get(name[4:])
        return one.get(keys.get(name, ""))

    wanted = {item["Name"]: item.get("Values", []) for item in filters}
    return [entry for entry in shown if all(value(entry, name) in values for name, values in wanted.items())]
