"""Wrappers around actions that moto has; new actions go through `additions.serving.serve`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


def around(owner: Any, name: str) -> Callable[[Method], Method]:
    """Replace `owner.name` by the decorated function, which receives the original as its first argument."""
    original = getattr(owner, name)

    def put(function: Method) -> Method:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, method)
        return function

    return put


def get_or_create(backend: Any, name: str, factory: Callable[[], Any]) -> Any:
    """Return the value that an addition stores on an object of moto, so that a reset of moto drops it as well."""
    if name not in backend.__dict__:
        backend.__dict__[name] = factory()
    return backend.__dict__[name]
