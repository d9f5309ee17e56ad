"""Time, money and counts of parameters as text."""

from __future__ import annotations

import pytest

from planner.units import parameters_text, span_text, usd_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.6, "1m 00s"), (655, "10m 55s"), (3599.7, "1h 00m"), (14_328, "3h 58m"), (2_847_600, "32d 23h")],
)
def test_span_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


@pytest.mark.parametrize(("usd", "text"), [(0.114, "0.11"), (99.994, "99.99"), (99.996, "100"), (284_596.2, "284,596")])
def test_small_sums_have_cents(usd: float, text: str) -> None:
    assert usd_text(usd) == text


@pytest.mark.parametrize(("count", "text"), [(8_030_261_248, "8.03 B"), (999_900_000, "1 B"), (123_600_000, "124 M")])
def test_parameters_are_millions_below_a_billion(count: int, text: str) -> None:
    assert parameters_text(count) == text
