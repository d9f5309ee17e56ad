"""Values as the kernel and its tools write them: fields of one value compare one by one, numbers as numbers."""

from __future__ import annotations

from itertools import zip_longest

_ENDLESS = ("unlimited", "infinity")


def satisfies(current: str, wanted: str, compare: str = "exact") -> bool:
    """Check whether the current value will do; `at-least` and `at-most` compare each field, and texts can only be equal."""
    pairs = list(zip_longest(current.split(), wanted.split()))
    return all(value is not None and bound is not None and _field(value, bound, compare) for value, bound in pairs)


def merge(current: str, wanted: str, compare: str = "exact") -> str:
    """Return what to write where `current` does not satisfy: never lower for `at-least`, never higher for `at-most`."""
    ours, theirs = wanted.split(), current.split()
    if compare == "exact" or len(ours) != len(theirs):
        return wanted
    return " ".join(old if _field(old, new, compare) else new for old, new in zip(theirs, ours))


def _field(current: str, wanted: str, compare: str) -> bool:
    value, bound = number(current), number(wanted)
    if value is None or bound is None:
        return current == wanted
    if compare == "at-least":
        return value >= bound
    return value <= bound if compare == "at-most" else value == bound


def number(text: str) -> float | None:
    """Read a number, `unlimited` and `infinity` being the largest; None for other text."""
    if text.lower() in _ENDLESS:
        return float("inf")
    try:
        return int(text, 0) if text.lower().startswith("0x") else float(text)
    except ValueError:
        return None
