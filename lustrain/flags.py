"""Flags of a task: a frozen dataclass whose fields carry their help."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import MISSING
from typing import Any

from lustrain.problem import UserError, problem

CLUSTER = "file with a Cluster; else LUSTRAIN_CLUSTER in the environment"
STACK = "take the Cluster from the output of the Pulumi stack of this name, like org/project/prod"
JSON = "print one JSON object"


def flag(default: Any = MISSING, help: str = "") -> Any:
    """Declare a field of a task's flags. Without a default it may be given by place; with `()` it may be repeated."""
    return dataclasses.field(default=default, metadata={"help": help})


def number(path: str, text: str, least: float, most: float, *, whole: bool = True) -> float:
    """Read the number that a flag gives as text. UserError."""
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        why = "must be a whole number" if whole else "must be a number"
        raise UserError(problem(path, text, why, allowed=f"{least:g} to {most:.15g}"))
    return value
