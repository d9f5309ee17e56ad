"""Promises of the interval: least time lost, the operator's number where given."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.save.interval import Interval, young_daly


def lost_share(interval: float, stall: float, mtbf: float) -> float:
    """Time per useful second with interruptions at random (exponential), as Daly's model has it."""
    return mtbf * math.expm1((interval + stall) / mtbf) / interval


@given(st.floats(0.01, 60), st.floats(60, 7 * 86400))
def test_no_other_interval_loses_noticeably_less_time(stall: float, mtbf: float) -> None:
    chosen = lost_share(young_daly(stall, mtbf), stall, mtbf)
    best = min(lost_share(math.sqrt(2 * stall * mtbf) * factor / 20, stall, mtbf) for factor in range(1, 80))
    assert chosen <= best * 1.002


def test_interval_of_the_papers_example_and_a_hopeless_machine() -> None:
    assert young_daly(0.34, 4 * 3600) == pytest.approx(math.sqrt(2 * 0.34 * 4 * 3600), rel=0.01)
    assert young_daly(20, 10) == 10


def test_fixed_interval_saves_at_multiples_and_catches_up() -> None:
    interval = Interval(every_steps=5, mtbf_s=3600)
    interval.resumed(7)
    saved = []
    for step in range(8, 24):
        if interval.should_save(step) and step != 15:
            interval.saved(step)
            saved.append(step)
    assert saved == [10, 16, 20]


def test_a_derived_interval_follows_what_steps_and_stalls_cost() -> None:
    interval = Interval(every_steps=0, mtbf_s=4 * 3600)
    interval.measured_step(0.1)
    assert not any(interval.should_save(step) for step in range(1, 10))
    for _ in range(50):
        interval.measured_step(0.5)
        interval.measured_stall(0.34)
    expected = young_daly(0.34, 4 * 3600) / 0.5
    assert interval.steps == pytest.approx(expected, rel=0.02)
    interval.saved(100)
    assert not interval.should_save(100 + interval.steps - 1)
    assert interval.should_save(100 + interval.steps)


@pytest.mark.slow
@given(st.floats(0, 1e4), st.floats(0, 1e7), st.integers(1, 100))
def test_an_interval_is_never_less_than_a_step(step_s: float, stall_s: float, mtbf_s: int) -> None:
    interval = Interval(every_steps=0, mtbf_s=mtbf_s)
    interval.measured_step(step_s)
    interval.measured_stall(stall_s)
    assert interval.steps >= 1
