"""Records survive the trip through text, and parts merge into one history."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics.reader import merge_steps, parse_part
from trainer.metrics.records import DamagedLineError, PartName, decode, encode

NUMBERS_AS_TEXT = {"NaN", "Infinity", "-Infinity"}
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text().filter(lambda text: text not in NUMBERS_AS_TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), values))
def test_every_record_reads_back_as_it_was(record: dict[str, Any]) -> None:
    """Numbers to the last bit: each has a text of its own in Python."""
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert repr(decode(line)) == repr(record)


def test_what_json_cannot_say_is_readable_by_any_json_reader() -> None:
    line = encode({"loss": math.nan, "grad_norm": math.inf, "worst": [-math.inf]})
    assert json.loads(line) == {"loss": "NaN", "grad_norm": "Infinity", "worst": ["-Infinity"]}


def test_what_is_no_json_value_is_refused_where_it_was_made() -> None:
    with pytest.raises(TypeError):
        encode({"loss": object()})


@given(st.binary(max_size=60))
def test_any_bytes_are_a_record_or_a_damaged_line(line: bytes) -> None:
    with contextlib.suppress(DamagedLineError):
        assert isinstance(decode(line), dict)


@given(st.integers(0, 10**8), st.integers(0, 10**7))
def test_part_names_read_back_and_sort_like_their_numbers(generation: int, part: int) -> None:
    name = PartName(generation, part)
    assert PartName.of_key(name.key("metrics/")) == PartName.of_key(name.key("events/")) == name
    assert PartName.of_key("metrics/notes.txt") is None


def test_half_written_line_is_reported_by_number_others_are_read() -> None:
    problems: list[str] = []
    whole = [encode({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    body = whole[0] + whole[1][:11] + b"\n" + b'{"loss": 1}\n' + b"[1]\n" + whole[2][:-9]
    records = parse_part("metrics/000001-00000.jsonl", body, problems.append)
    assert [record["step"] for record in records] == [1]
    assert [problem.split(": left out")[0] for problem in problems] == [
        f"metrics/000001-00000.jsonl line {number}" for number in (2, 3, 4, 5)
    ]


@st.composite
def lives(draw: st.DrawFn) -> tuple[dict[int, list[dict[str, int]]], dict[int, int]]:
    """Attempts that each go on from a step their predecessors had reached, and which attempt's record should count."""
    by_generation: dict[int, list[dict[str, int]]] = {}
    expected: dict[int, int] = {}
    generation = 0
    for _ in range(draw(st.integers(1, 5))):
        generation += draw(st.integers(1, 3))
        start = draw(st.integers(0, max(expected, default=0)))
        steps = range(start + 1, start + 1 + draw(st.integers(0, 6)))
        by_generation[generation] = [{"step": step, "attempt": generation} for step in steps]
        if steps:
            expected = {step: by for step, by in expected.items() if step <= start} | dict.fromkeys(steps, generation)
    return by_generation, expected


@given(lives())
def test_for_each_step_the_newest_attempt_counts(
    case: tuple[dict[int, list[dict[str, int]]], dict[int, int]],
) -> None:
    by_generation, expected = case
    merged = merge_steps(by_generation)
    assert [(record["step"], record["attempt"]) for record in merged] == sorted(expected.items())
