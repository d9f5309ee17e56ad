"""Values as the kernel and its tools write them: fields of one value compare one by one, numbers as numbers."""

from __future__ import annotations

from itertools import zip_longest

_ENDLESS = ("unlimited", "infinity")


def satisfies(found: str, wanted: str, compare: str = "exact") -> bool:
    """Whether what was found will do; `at-least` and `at-most` look at each field, and texts can only be equal."""
    pairs = list(zip_longest(found.split(), wanted.split()))
    return all(one is not None and other is not None and _field(one, other, compare) for one, other in pairs)


def merged(found: str, wanted: str, compare: str = "exact") -> str:
    """Return what to write where `found` does not satisfy: never lower for `at-least`, never higher for `at-most`."""
    ours, theirs = wanted.split(), found.split()
    if compare == "exact" or len(ours) != len(theirs):
        return wanted
    return " ".join(old if _field(old, new, compare) else new for old, new in zip(theirs, ours))


def _field(found: str, wanted: str, compare: str) -> bool:
    one, other = number(found), number(wanted)
    if one is None or other is None:
        return found == wanted
    if compare == "at-least":
        return one >= other
    return one <= other if compare == "at-most" else one == other


def number(text: str) -> float | None:
    """Read a number, `unlimited` and `infinity` being the largest; None for other text."""
    if text.lower() in _ENDLESS:
        return float("inf")
    try:
        return int(text, 0) if text.lower().startswith("0x") else float(text)
    except ValueError:
        return None
