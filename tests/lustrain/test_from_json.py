"""What `asdict` and JSON make of a dataclass comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, make_dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.from_json import from_json


@dataclass(frozen=True)
class Inner:
    name: str
    share: float
    flag: bool = False


@dataclass(frozen=True)
class Outer:
    number: int
    inner: Inner | None
    many: tuple[Inner, ...]
    pairs: tuple[tuple[int, str], ...]
    by_name: Mapping[str, Inner]
    free: dict[str, Any]
    later: int = 7


TEXT, NUMBER = st.text(max_size=3), st.integers(-9, 9)
INNER = st.builds(Inner, TEXT, st.floats(allow_nan=False), st.booleans())
OUTER = st.builds(
    Outer,
    NUMBER,
    st.none() | INNER,
    st.lists(INNER, max_size=2).map(tuple),
    st.lists(st.tuples(NUMBER, TEXT), max_size=2).map(tuple),
    st.dictionaries(TEXT, INNER, max_size=2),
    st.dictionaries(TEXT, NUMBER | TEXT | st.lists(NUMBER, max_size=2), max_size=2),
)
WHOLE: dict[str, Any] = {"number": 1, "inner": None, "many": [], "pairs": [[1, "a"]], "by_name": {}, "free": {}}


@given(OUTER)
def test_a_dataclass_comes_back_as_it_was(record: Outer) -> None:
    assert from_json(Outer, asdict(record)) == record
    assert from_json(Outer, json.loads(json.dumps(asdict(record)))) == record


def test_a_missing_field_takes_its_default_and_others_are_dropped() -> None:
    assert from_json(Outer, {**WHOLE, "of_a_later_version": 1}).later == 7


def test_a_whole_number_serves_as_a_float() -> None:
    share = from_json(Inner, {"name": "a", "share": 1}).share
    assert (share, type(share)) == (1.0, float)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_missing_field_without_a_default_is_an_error(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        from_json(Outer, {key: value for key, value in WHOLE.items() if key != name})


@pytest.mark.parametrize(
    "change",
    [
        {"number": True},
        {"number": "1"},
        {"number": None},
        {"inner": []},
        {"inner": {"name": 1, "share": 1.0}},
        {"inner": {"name": "a", "share": "1"}},
        {"inner": {"name": "a", "share": 10**400}},
        {"many": "ab"},
        {"many": {}},
        {"pairs": [[1]]},
        {"pairs": [[1, "a", 2]]},
        {"by_name": {"a": None}},
        {"free": []},
    ],
    ids=reprlib.repr,
)
def test_a_value_of_another_form_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_json(Outer, WHOLE | change)


@pytest.mark.parametrize("value", [None, [], "text", 1])
def test_what_is_no_table_is_an_error(value: object) -> None:
    with pytest.raises(TypeError):
        from_json(Outer, value)


def test_an_error_about_a_value_of_any_size_is_short() -> None:
    with pytest.raises(TypeError) as long:
        from_json(Outer, WHOLE | {"many": "x" * 100_000})
    assert len(str(long.value)) < 200


@pytest.mark.parametrize("kind", [int | str, Literal["a"], set[int], bytes], ids=str)
def test_a_type_that_is_not_read_is_no_damage_of_the_record(kind: Any) -> None:
    with pytest.raises(NotImplementedError):
        from_json(make_dataclass("Record", [("value", kind)]), {"value": "a"})
