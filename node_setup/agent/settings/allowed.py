"""Rules for overrides: `integer`, `integer >= a`, `integer <= a`, `integer a..b`, `one of x, y`, `path`, or `text`."""

from __future__ import annotations

import re

_INTEGER = re.compile(r"integer(?: (?:(>=|<=) (-?\d+)|(-?\d+)\.\.(-?\d+)))?\Z")
_PATH = re.compile(r"(?:/[A-Za-z0-9._-]+)+\Z")
"""An absolute path that a unit file and a command line take as it is."""
LONGEST = 200


def is_rule(rule: str) -> bool:
    return rule in ("text", "path") or bool(_choices(rule)) or _INTEGER.match(rule) is not None


def accepts(rule: str, value: str) -> bool:
    """Check that a value keeps to a rule; no rule takes a line end, as values go into files of one line a value."""
    if not value or len(value) > LONGEST or not value.isprintable() or value != value.strip():
        return False
    if rule == "text":
        return True
    if rule == "path":
        return _PATH.match(value) is not None
    choices = _choices(rule)
    if choices:
        return value in choices
    return _integer_in(rule, value)


def _choices(rule: str) -> list[str]:
    if not rule.startswith("one of "):
        return []
    return [choice.strip() for choice in rule[len("one of ") :].split(",") if choice.strip()]


def _integer_in(rule: str, value: str) -> bool:
    parts = _INTEGER.match(rule)
    if parts is None or re.fullmatch(r"-?[0-9]+", value) is None:
        return False
    side, bound, low, high = parts.groups()
    number = int(value)
    if side is not None:
        return number >= int(bound) if side == ">=" else number <= int(bound)
    return low is None or int(low) <= number <= int(high)
