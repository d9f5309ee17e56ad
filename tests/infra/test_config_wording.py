"""Whatever stands under a key, what is said of it is ours: pydantic's own words speak of Python's types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from infra.config import ClusterSpec, parse
from lustrain.problem import UserError

FOREIGN = re.compile(r"\b(should|valid|unable|instance of|pydantic|tuple|mapping|dict|str|timezone)\b", re.IGNORECASE)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Tables that may stand under a key."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models(inner)


def keys(model: type[BaseModel], path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every key, into the first item of each list of tables."""
    for name, field in model.model_fields.items():
        here = (*path, name)
        yield here
        for inner in models(field.annotation):
            yield from keys(inner, (*here, 0) if "tuple" in str(field.annotation) else here)


KEYS = list(keys(ClusterSpec))
SCALARS: Any = st.sampled_from(
    [None, True, -1, 0, 10**30, 10**5000, 0.5, math.inf, math.nan, "", "x", "1", "2027-13-01T00:00"]
)
VALUES = SCALARS | st.just(date(2027, 3, 1)) | st.just(b"x") | st.lists(SCALARS, max_size=2)
VALUES |= st.dictionaries(st.sampled_from(["a", 1, None]), SCALARS | st.lists(SCALARS, max_size=1), max_size=2)


def nested(path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    inner = nested(path[1:], value)
    return {path[0]: inner} if isinstance(path[0], str) else [inner]


def said(value: object) -> list[str]:
    try:
        parse(value)
    except UserError as error:
        return error.problems
    return []


def foreign(line: str) -> str:
    """Pydantic's words in a line, the key and the user's value left out of it."""
    found = FOREIGN.search(line.partition(": ")[2])
    return found[0] if found else ""


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("groups", "train", "wrong type; allowed: a list, like [a, b]"),
        ("network", ["closed"], "wrong type; allowed: a table of keys"),
        ("tags", "a=b", "wrong type; allowed: a table of keys"),
        ("runs_uri", 7, "wrong type; allowed: text, in quotes where it looks like a number"),
        ("name", "a" * 41, "not allowed; allowed: 40 characters at most"),
        ("job_ends_at", "2027-01-01T00:00:00", 'allowed: a time with its zone, in quotes, like "2027-03-01T11:30:00Z"'),
        ("job_ends_at", "0001-01-01T00:00:00+23:59", "allowed: the years 2000 to 9000"),
        ("job_ends_at", "9999-12-31T23:59:59-23:59", "allowed: the years 2000 to 9000"),
    ],
)
def test_a_wrong_type_is_said_in_plain_words(key: str, value: object, allowed: str) -> None:
    (line,) = [line for line in said({key: value}) if line.startswith(f"lustrain:cluster.{key} = ")]
    assert allowed in line


def test_every_key_takes_a_wrong_type_in_our_words() -> None:
    wrong = (3, "x", [[]], {"a": {}}, [], -1.5)
    lines = {line for path in KEYS for value in wrong for line in said(nested(path, value))}
    assert len(lines) > len(KEYS)
    assert {foreign(line) for line in lines} == {""}


@given(st.sampled_from(KEYS), VALUES)
def test_whatever_stands_under_a_key_is_answered_in_our_words(path: tuple[str | int, ...], value: object) -> None:
    for line in said(nested(path, value)):
        assert not foreign(line), line
        assert line.isprintable()
