"""A mistake in what the agent was asked, as one line in the house form `path = value: why; allowed: …; fix: …`."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST_VALUE = 120


def problem(path: str, value: object, why: str, allowed: str = "", fix: str = "") -> str:
    """One line; what is not printable in foreign text is escaped, long values are cut."""
    shown = repr(value)
    if len(shown) > LONGEST_VALUE:
        shown = shown[:LONGEST_VALUE] + "…"
    ends = [f"allowed: {allowed}" if allowed else "", f"fix: {fix}" if fix else ""]
    line = "; ".join([f"{path} = {shown}: {why}", *filter(None, ends)])
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A fix that lists the nearest names; empty where none is near."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(names), 3, 0.7)
    return "did you mean " + " or ".join(close) + "?" if close else ""
