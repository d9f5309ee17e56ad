"""Tables of a configuration: their base, forms of text, and what pydantic finds wrong as problems of the house."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator

from lustrain.problem import Problem, did_you_mean, problem

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, Unicode's two line ends, and halves of surrogate pairs."""


def like(pattern: str, what: str, example: str) -> AfterValidator:
    """Return a type of text of a known form; the message says what it should be and shows one."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(f"is not {what}; allowed: like {example}")
        return value

    return AfterValidator(check)


class Section(BaseModel):
    """Base of every table: unknown keys are errors, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    unprintable: ClassVar[re.Pattern[str]] = UNPRINTABLE
    """What no text may hold."""

    @field_validator("*", mode="before")
    @classmethod
    def _printable(cls, value: Any, info: Any) -> Any:
        """No name, path or text of AWS has control characters, and a lone surrogate can be neither printed nor sent."""
        table = "Mapping" in str(cls.model_fields[info.field_name].annotation) and isinstance(value, Mapping)
        items = [*value, *value.values()] if table else value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, str) and (match := cls.unprintable.search(item)):
                raise ValueError(f"holds {match[0]!r}, which is not printable; fix: remove it")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_numbers_from_truth(cls, value: Any, info: Any) -> Any:
        """YAML's `count: yes` is a mistake; pydantic would take it as 1, unless the table is strict."""
        field = cls.model_fields[info.field_name]
        if isinstance(value, bool) and not cls.model_config.get("strict") and "bool" not in str(field.annotation):
            raise ValueError("true/false is not a value here")
        return value


A_TIME = 'a time with its zone, in quotes, like "2027-03-01T11:30:00Z"'
YAML: Mapping[str, str] = {
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
    "date": "a day without quotes, like 2027-01-31",
    "datetime": A_TIME,
    "timezone": A_TIME,
}
"""What may stand in a YAML file, by the first word of pydantic's kind of error; its own messages speak of Python's types."""
TOML = {**YAML, "string": "text in quotes"}
"""The same for TOML, where text always has quotes."""
OTHERWISE = "another value"
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def problems_of(
    error: ValidationError, model: type[BaseModel], prefix: str = "", *, words: Mapping[str, str] = YAML
) -> list[Problem]:
    """Return one line for each of pydantic's errors in a `model`; for an unknown key, with the key that was probably meant.

    `words` are those of the file's format, YAML or TOML.
    """
    return [_line(item, model, prefix, words) for item in error.errors(include_url=False)]


def _line(item: Any, model: type[BaseModel], prefix: str, words: Mapping[str, str]) -> Problem:
    place = [str(part) for part in item["loc"]]
    path = ".".join(filter(None, [prefix, *place]))
    kind, context = item["type"], item.get("ctx", {})
    if kind == "missing":
        return Problem(f"{path} is missing: it has no default; fix: add it", path=path, why="is missing", fix="add it")
    if kind == "extra_forbidden":
        return problem(path, item["input"], "unknown key", fix=_meant(model, item["loc"]))
    if kind == "value_error":
        return problem(path, item["input"], str(context["error"]))
    why = "wrong type" if kind.endswith(("_type", "_parsing", "_from_float")) else "not allowed"
    return problem(path, item["input"], why, allowed=_allowed(kind, context, words))


def _allowed(kind: str, context: Mapping[str, Any], words: Mapping[str, str] = YAML) -> str:
    if kind == "literal_error":
        return str(context["expected"])
    if kind in ("too_short", "too_long"):
        return _counted(context, "items")
    if kind in ("string_too_short", "string_too_long"):
        return _counted(context, "characters")
    if bounded := ", ".join(f"{sign} {context[name]}" for name, sign in _BOUNDS.items() if name in context):
        return bounded
    demands = {"pattern", "multiple_of"} & context.keys()
    demanded = ", ".join(f"{name.replace('_', ' ')} {context[name]}" for name in sorted(demands))
    return demanded or words.get(kind.partition("_")[0], OTHERWISE)


def _counted(context: Mapping[str, Any], what: str) -> str:
    """Of `too_long` and `too_short`; the former comes with both bounds where there are both."""
    if "max_length" in context:
        return f"{context['max_length']} {what} at most"
    least = context["min_length"]
    return f"{least} {what if least > 1 else what.removesuffix('s')} or more"


def _meant(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return which key of the same table an unknown one was probably meant to be."""
    keys = sorted(_fields(model, location[:-1]))
    return did_you_mean(str(location[-1]), keys) or f"remove it; known here: {', '.join(keys)}"


def _fields(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    table: type[BaseModel] | None = model
    for key in location:
        # Of a list or a table of tables the location has the index or the name as well.
        if table is None or key not in table.model_fields:
            continue
        table = _model_in(table.model_fields[str(key)].annotation)
    return list(table.model_fields) if table else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if model := _model_in(inner):
            return model
    return None
