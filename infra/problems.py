"""A user's mistake as one line in the house form `path = value: why; allowed: …; fix: …`, many of them at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

LONGEST_VALUE = 120


class InfraError(Exception):
    """Something the user can mend: printed as plain lines, one a problem, never as a traceback; exit code 2."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def plain(text: str) -> str:
    """One line that every terminal takes: control characters, line ends and lone surrogates are escaped."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


_PAGE = re.compile(r"<\s*/?(!doctype|html|head|body|title)\b", re.IGNORECASE)


def is_page(text: str) -> bool:
    """Whether this is a page for people, which a proxy, a portal or a load balancer sends in place of AWS's answer."""
    return _PAGE.search(text) is not None


def without_page(text: str) -> str:
    """What AWS said, or in place of a page that it is one."""
    return "an HTML page, so that something else than AWS answers" if is_page(text) else text


def problem(path: str, value: object, why: str, *, allowed: str = "", fix: str = "") -> str:
    """One line; what is not printable in foreign text is escaped, long values are cut."""
    try:
        shown = repr(value)
    except (RecursionError, ValueError):
        # Python prints no whole number of more than 4,300 digits.
        shown = f"a {type(value).__name__} that is too large to show"
    if len(shown) > LONGEST_VALUE:
        shown = shown[:LONGEST_VALUE] + "…"
    ends = [f"allowed: {allowed}" if allowed else "", f"fix: {fix}" if fix else ""]
    return plain("; ".join([f"{path} = {shown}: {why}", *filter(None, ends)]))


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """One line for each thing pydantic found wrong in a `model`; unknown keys come with what was probably meant."""
    return [_line(item, model, prefix) for item in error.errors(include_url=False)]


def _line(item: Any, model: type[BaseModel], prefix: str) -> str:
    place = [str(part) for part in item["loc"]]
    path = ".".join(filter(None, [prefix, *place]))
    kind, context = item["type"], item.get("ctx", {})
    if kind == "missing":
        return plain(f"{path} is missing: it has no default; fix: add it")
    if kind == "extra_forbidden":
        return problem(path, item["input"], "unknown key", fix=_meant(model, item["loc"]))
    if kind == "value_error":
        return problem(path, item["input"], str(context["error"]))
    why = "wrong type" if kind.endswith(("_type", "_parsing", "_from_float")) else "not allowed"
    return problem(path, item["input"], why, allowed=_allowed(kind, context))


A_TIME = 'a time with its zone, in quotes, like "2027-03-01T11:30:00Z"'
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number that is not infinite",
    "bool": "true or false",
    "string": "text, in quotes where it looks like a number, a date or true",
    "tuple": "a list, like [a, b]",
    "list": "a list, like [a, b]",
    "model": "a table of keys",
    "mapping": "a table of keys",
    "dict": "a table of keys",
    "invalid": "keys that are text",
    "datetime": A_TIME,
    "timezone": A_TIME,
}
"""What pydantic's kinds of errors come to, by the first word of the kind; its own messages speak of Python's types."""
OTHERWISE = "another value, as the examples in infra/Pulumi.*.yaml show"


def _allowed(kind: str, context: Mapping[str, Any]) -> str:
    if kind == "literal_error":
        return str(context["expected"])
    if kind in ("too_short", "too_long"):
        return _counted(context, "items")
    if kind in ("string_too_short", "string_too_long"):
        return _counted(context, "characters")
    bounds = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounded = ", ".join(f"{sign} {context[name]}" for name, sign in bounds.items() if name in context)
    return bounded or _WORDS.get(kind.partition("_")[0], OTHERWISE)


def _counted(context: Mapping[str, Any], what: str) -> str:
    """Of `too_long` and `too_short`; the former comes with both bounds where there are both."""
    if "max_length" in context:
        return f"{context['max_length']} {what} at most"
    return f"{context['min_length']} {what} or more"


def _meant(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """Which key of the same table an unknown one was probably meant to be."""
    keys = sorted(_fields(model, location[:-1]))
    close = difflib.get_close_matches(str(location[-1]), keys, 1)
    return f"did you mean {close[0]}?" if close else f"remove it; known here: {', '.join(keys)}"


def _fields(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    found: type[BaseModel] | None = model
    for key in location:
        if isinstance(key, int) or found is None:
            continue
        field = found.model_fields.get(key)
        found = _model_in(field.annotation) if field else None
    return list(found.model_fields) if found else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if found := _model_in(inner):
            return found
    return None
