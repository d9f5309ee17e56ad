"""The moment for which preflight's rules decide what has ended."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from infra.section import Time
from lustrain.problem import UserError, problem

NOW = "LUSTRAIN_NOW"
"""Environment variable that stands for the clock: whether a stack will still pass next month, and a fixed day for tests."""
_TIME: TypeAdapter[Any] = TypeAdapter(Time)


def now() -> datetime:
    """Return the time in LUSTRAIN_NOW, else the clock's; UserError where the variable holds no time with its zone."""
    given = os.environ.get(NOW)
    if not given:
        return datetime.now(UTC)
    try:
        return _TIME.validate_python(given)  # type: ignore[no-any-return]
    except ValidationError:
        allowed = "a time with its zone, like 2027-03-01T11:30:00Z"
        raise UserError(problem(NOW, given, "not allowed", allowed=allowed, fix="set it so, or unset it")) from None
