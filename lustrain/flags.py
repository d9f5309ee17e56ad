"""Flags of a task: a frozen dataclass whose fields carry their help."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from typing import Any


def flag(default: Any = MISSING, help: str = "") -> Any:
    """Declare a field of a task's flags. Without a default it may be given by place; with `()` it may be repeated."""
    return dataclasses.field(default=default, metadata={"help": help})
