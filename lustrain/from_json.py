"""Dataclasses out of JSON: the way back from `dataclasses.asdict`. Standard library only."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_json(kind: type[T], value: Any) -> T:
    """Return the `kind` of which `asdict` made `value`, by way of JSON or not; keys of no field are passed over.

    A field that has a default may be missing. KeyError for any other, TypeError or ValueError for a value of another form.
    NotImplementedError where a field of `kind` is of a type that is not read here, whatever the value.
    """
    made: T = _reader(kind)(value)  # type: ignore[arg-type]  # mypy takes no type[T] for hashable
    return made


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that reads a type; made once, since a checkpoint has a hundred thousand of some records."""
    of, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if is_dataclass(kind):
        return _fields_reader(kind)
    if of in (Union, types.UnionType):
        one, *others = (_reader(each) for each in inner if each is not types.NoneType)
        if others:
            raise NotImplementedError(f"{kind} may be one of several types")
        return lambda value: None if value is None else one(value)
    if of is tuple and inner[1:] == (...,):
        item = _reader(inner[0])
        return lambda value: tuple([item(each) for each in _require_items(value)])
    if of is tuple:
        items = [_reader(each) for each in inner]
        return lambda value: tuple([item(each) for item, each in zip(items, _require_items(value), strict=True)])
    if of in (dict, Mapping):
        item = _reader(inner[1])
        return lambda value: {key: item(each) for key, each in _require(dict, value).items()}
    if kind is float:
        return _read_float
    if kind in (bool, int, str):
        return lambda value: _require(kind, value)
    raise NotImplementedError(f"{kind} is no type that is read from JSON")


def _fields_reader(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    defaults = {field.name for field in fields(kind) if (field.default, field.default_factory) != (MISSING, MISSING)}
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}

    def read(value: Any) -> Any:
        table = _require(dict, value)
        return kind(
            **{name: one(table[name]) for name, one in readers.items() if name in table or name not in defaults}
        )

    return read


def _read_float(value: Any) -> float:
    if type(value) is not int:
        return _require(float, value)
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{reprlib.repr(value)} is beyond every float") from error


def _require_items(value: Any) -> Any:
    return value if type(value) is tuple else _require(list, value)


def _require(kind: type[T], value: Any) -> T:
    # Not isinstance: true is no number.
    if type(value) is not kind:
        raise TypeError(f"{reprlib.repr(value)} is not of type {kind.__name__}")
    return value
