"""Conditions on facts: `fact.path OP literal`, a bare path (is it true), `not path`; three outcomes, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from node_setup.agent.model import format_value, look_up

HOLDS, FAILS, UNKNOWN = "holds", "fails", "unknown"
_PATH = r"[A-Za-z_][\w./@:-]*"
_TEST = re.compile(rf"({_PATH})\s*(>=|<=|==|!=|>|<|\bin\b)\s*(\S.*)\Z")
_BARE = re.compile(rf"(not\s+)?({_PATH})\Z")
_REQUEST_ROOTS = ("document", "group", "profile")
"""These roots hold what the caller wants, not what the node is: where a value is missing, it is not wanted, and not unknown."""
_LISTS = ("services", "packages.installed", "sysctl", "kernel.cmdline", "modules.parameters", "disk")
"""These facts list what there is: a name that is not in them is not on the node."""


@dataclass(frozen=True)
class Condition:
    """This is a parsed condition: `operator` is empty for a bare path; `literals` are the alternatives of `in`, else one."""

    text: str
    path: str
    operator: str = ""
    literals: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True)
class Judgement:
    """This is a condition's result: `status` is holds, fails or unknown; `why` is for a person and empty where it holds."""

    status: str
    why: str = ""


def parse(text: str) -> Condition:
    """Parse a condition. ValueError with what is wrong."""
    bare = _BARE.match(text.strip())
    if bare:
        return Condition(text, bare.group(2), negated=bare.group(1) is not None)
    test = _TEST.match(text.strip())
    if test is None:
        raise ValueError("not a condition: write `fact.path >= 1`, `fact.path`, or `not fact.path`")
    path, operator, right = test.groups()
    literals = tuple(
        word.strip().strip("\"'") for word in (right.strip("[]").split(",") if operator == "in" else [right])
    )
    if operator in (">", "<", ">=", "<=") and _number(literals[0]) is None:
        raise ValueError(f"{operator} needs a number on its right")
    return Condition(text, path, operator, literals)


def judge(condition: Condition, tree: Mapping[str, Any]) -> Judgement:
    """Judge a condition: a fact that is missing or None is unknown; what is not wanted, or not on the node, is false."""
    exists, value = look_up(tree, condition.path)
    if not exists or value is None:
        if not _absent(condition.path, tree):
            return Judgement(UNKNOWN, f"{condition.path} could not be read, needs {_needs(condition)}")
        value = None
    holds = _compares(value, condition) if condition.operator else _true(value) != condition.negated
    return Judgement(HOLDS) if holds else Judgement(FAILS, _failed(condition, value))


def _absent(path: str, tree: Mapping[str, Any]) -> bool:
    """Check whether a missing value means that the thing is absent, and not that it could not be read."""
    if path.split(".")[0] in _REQUEST_ROOTS:
        return True
    return any(path.startswith(name + ".") and isinstance(look_up(tree, name)[1], Mapping) for name in _LISTS)


def _true(value: Any) -> bool:
    if isinstance(value, Mapping) and "load" in value:
        return bool(value["load"] == "loaded")
    return bool(value)


def _compares(value: Any, condition: Condition) -> bool:
    if condition.operator == "in":
        return format_value(value) in condition.literals
    literal = condition.literals[0]
    ours, theirs = _number(format_value(value)), _number(literal)
    if condition.operator in ("==", "!="):
        same = format_value(value) == literal or (ours is not None and ours == theirs)
        return same == (condition.operator == "==")
    if ours is None or theirs is None:
        return False
    return {">": ours > theirs, "<": ours < theirs, ">=": ours >= theirs, "<=": ours <= theirs}[condition.operator]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _failed(condition: Condition, value: Any) -> str:
    if condition.operator:
        return f"{condition.path} is {'not set' if value is None else format_value(value)}, needs {_needs(condition)}"
    if condition.negated:
        return (
            f"{condition.path} is there"
            if isinstance(value, (Mapping, list))
            else f"{condition.path} is {format_value(value)}"
        )
    if value is None or isinstance(value, (Mapping, list)):
        return f"no {condition.path}"
    return f"{condition.path} is {format_value(value) or 'empty'}"


def _needs(condition: Condition) -> str:
    if condition.operator == "in":
        return "one of " + ", ".join(condition.literals)
    if condition.operator:
        return f"{condition.operator} {condition.literals[0]}"
    return "it not to be there" if condition.negated else "it"
