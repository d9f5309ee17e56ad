"""Money and counts of parameters as text."""

from __future__ import annotations

import pytest

from planner.units import parameters_text, usd_text


@pytest.mark.parametrize(("usd", "text"), [(0.114, "0.11"), (99.994, "99.99"), (99.996, "100"), (284_596.2, "284,596")])
def test_small_sums_have_cents(usd: float, text: str) -> None:
    assert usd_text(usd) == text


@pytest.mark.parametrize(("count", "text"), [(8_030_261_248, "8.03 B"), (999_900_000, "1 B"), (123_600_000, "124 M")])
def test_parameters_are_millions_below_a_billion(count: int, text: str) -> None:
    assert parameters_text(count) == text
