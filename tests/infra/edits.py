"""Specs for tests: the example stacks, and edits of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from infra.config import ClusterSpec, parse
from infra.plan.place import Place

FOLDER = Path(__file__).parents[2] / "infra"
STACKS = (
    "ec2-capacity-block-p5en",
    "ec2-p6-b300-reservation",
    "ec2-slurm-g6e",
    "ec2-spot-g6e",
    "hyperpod-eks-g6e-spot",
    "hyperpod-slurm-p5",
    "rehearsal",
)
"""By name: beside them a user has stacks of their own."""
ACCOUNT = "123456789012"


class Removal(Enum):
    """An edit that is no value; an enum, so that a test's id spells its name and is the same in every process."""

    GONE = "gone"


GONE = Removal.GONE
"""As a value in an edit: remove the key."""


def config(stack: str) -> dict[str, Any]:
    return copy.deepcopy(_config(stack))


@cache
def _config(stack: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"Pulumi.{stack}.yaml").read_text(encoding="utf-8"))["config"]  # type: ignore[no-any-return]


def place(stack: str) -> Place:
    return Place(_config(stack)["aws:region"], ACCOUNT)


def edited(stack: str, edits: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a stack with dotted keys set, list items by index; a list takes the index after its last."""
    found = config(stack)["lustrain:cluster"]
    for path, value in edits.items():
        *parents, last = path.split(".")
        table: Any = found
        for key in parents:
            table = table[int(key)] if isinstance(table, list) else table.setdefault(key, {})
        _put(table, last, copy.deepcopy(value))
    return found  # type: ignore[no-any-return]


def _put(table: Any, key: str, value: Any) -> None:
    if isinstance(table, list):
        if value is GONE:
            del table[int(key)]
        elif int(key) == len(table):
            table.append(value)
        else:
            table[int(key)] = value
    elif value is GONE:
        del table[key]
    else:
        table[key] = value


def spec_of(stack: str, edits: Mapping[str, Any]) -> ClusterSpec:
    return parse(edited(stack, edits))
