"""A user's mistake as one line in the house form `path = value: why; allowed: …; fix: …`, many of them at once."""

from __future__ import annotations

import difflib
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


def problem(path: str, value: object, why: str, *, allowed: str = "", fix: str = "") -> str:
    """One line; what is not printable in foreign text is escaped, long values are cut."""
    try:
        shown = repr(value)
    except RecursionError:
        shown = f"a {type(value).__name__} with too many levels"
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
    why = "wrong type" if kind.endswith("_type") else "not allowed"
    allowed = _allowed(kind, context)
    return problem(path, item["input"], why, allowed=allowed or item["msg"][0].lower() + item["msg"][1:])


def _allowed(kind: str, context: Mapping[str, Any]) -> str:
    if kind == "literal_error":
        return str(context["expected"])
    bounds = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounded = ", ".join(f"{sign} {context[name]}" for name, sign in bounds.items() if name in context)
    return bounded or (f"text like {context['pattern']}" if "pattern" in context else "")


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
