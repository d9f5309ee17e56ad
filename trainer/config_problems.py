"""What is wrong with a table of the configuration, in plain words: pydantic's own speak of Python's types."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from lustrain.problem import problem

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number, not inf or nan",
    "bool": "true or false",
    "string": "text in quotes",
    "tuple": "a list, like [a, b]",
    "list": "a list, like [a, b]",
    "model": "a table of keys",
    "mapping": "a table of keys",
    "dict": "a table of keys",
}
"""What pydantic's kinds of errors come to, by the first word of the kind."""
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LENGTHS = {"min_length": "at least", "max_length": "at most"}


def problems_of(error: ValidationError, prefix: str = "", *, model: type[BaseModel]) -> list[str]:
    """One `path = value: why; allowed; fix` line for each thing pydantic found wrong in a `model`."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in ((prefix,) if prefix else ()) + item["loc"])
        kind, context = item["type"], item.get("ctx", {})
        if kind == "missing":
            lines.append(f"{path} is missing: it has no default; fix: add it")
        elif kind == "extra_forbidden":
            lines.append(problem(path, item["input"], "unknown key", fix=_nearest(model, item["loc"])))
        elif kind == "value_error":
            lines.append(problem(path, item["input"], str(context["error"])))
        else:
            lines.append(problem(path, item["input"], _why(kind, context)))
    return lines


def _nearest(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """What an unknown key was probably meant to be."""
    section: Any = model
    for key in location[:-1]:
        field = getattr(section, "model_fields", {}).get(key)
        section = field.annotation if field else None
    meant = difflib.get_close_matches(str(location[-1]), getattr(section, "model_fields", {}), 1)
    return f"did you mean {meant[0]}?" if meant else "check the spelling, or remove it"


def _why(kind: str, context: Mapping[str, Any]) -> str:
    """What is wrong and what may stand there; the demands of a Task that is not ours are told name by name."""
    if kind.endswith(("_type", "_parsing", "_from_float")):
        return f"wrong type; allowed: {_WORDS.get(kind.partition('_')[0], 'another value')}"
    counted = "character(s)" if kind.startswith("string") else "item(s)"
    allowed = [f"{sign} {context[name]}" for name, sign in _BOUNDS.items() if name in context]
    allowed += [f"{sign} {context[name]} {counted}" for name, sign in _LENGTHS.items() if context.get(name) is not None]
    if kind == "literal_error":
        allowed = [str(context["expected"])]
    allowed = allowed or [f"{name.replace('_', ' ')} {value}" for name, value in context.items()]
    return f"not allowed; allowed: {', '.join(allowed) or _WORDS.get(kind.partition('_')[0], 'another value')}"
