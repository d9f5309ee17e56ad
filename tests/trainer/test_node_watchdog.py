"""A step that hangs is told from one that is slow, and from the time between steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.node.watchdog import CLOCK, MIN_HUNG_S, MIN_MEASURED, TIMES_MEDIAN, StepWatchdog, overdue_s

BEGAN = 1000.0


def clock_at(path: Path, seconds: list[float], stepping: bool) -> float:
    """Write the clock of a rank after steps of these seconds; returns when the step under way began."""
    clock = StepWatchdog(str(path), lambda: BEGAN)
    for one in seconds:
        clock.start_step()
        clock.end_step(one)
    if stepping:
        clock.start_step()
    return BEGAN


@pytest.mark.parametrize(("usual", "limit"), [(0.5, MIN_HUNG_S), (60.0, TIMES_MEDIAN * 60.0)])
def test_a_step_hangs_beyond_two_minutes_and_ten_times_the_usual(tmp_path: Path, usual: float, limit: float) -> None:
    began = clock_at(tmp_path / "0", [usual] * MIN_MEASURED, stepping=True)
    assert overdue_s(tmp_path / "0", began + limit - 1) is None
    assert overdue_s(tmp_path / "0", began + limit + 1) == limit + 1


@pytest.mark.parametrize(
    ("steps", "stepping"), [(MIN_MEASURED - 1, True), (100, False), (0, False)], ids=["compiling", "saving", "starting"]
)
def test_what_is_no_measured_step_may_take_as_long_as_it_needs(tmp_path: Path, steps: int, stepping: bool) -> None:
    began = clock_at(tmp_path / "0", [1.0] * steps, stepping=stepping)
    assert overdue_s(tmp_path / "0", began + 1e6) is None


def test_one_slow_step_does_not_move_the_limit(tmp_path: Path) -> None:
    began = clock_at(tmp_path / "0", [1.0, 1.0, 900.0], stepping=True)
    assert overdue_s(tmp_path / "0", began + MIN_HUNG_S + 1) is not None


def test_rank_with_a_launcher_writes_its_step_on_launchers_clock(tmp_path: Path) -> None:
    before = time.monotonic()
    clock = StepWatchdog.of({CLOCK: str(tmp_path / "0")})
    for _ in range(MIN_MEASURED):
        clock.end_step(1.0)
    clock.start_step()
    now = time.monotonic() + MIN_HUNG_S + 1
    hangs = overdue_s(tmp_path / "0", now)
    assert hangs is not None
    assert MIN_HUNG_S < hangs <= now - before


def test_age_of_a_step_is_0_between_steps() -> None:
    now = [BEGAN]
    clock = StepWatchdog(None, lambda: now[0])
    assert clock.age_s() == 0.0
    clock.start_step()
    now[0] += 90.0
    assert clock.age_s() == 90.0
    clock.end_step(90.0)
    now[0] += 600.0
    assert clock.age_s() == 0.0


def test_rank_without_a_launcher_writes_no_clock_and_is_no_hang(tmp_path: Path) -> None:
    clock = StepWatchdog.of({})
    clock.start_step()
    clock.end_step(1.0)
    assert overdue_s(tmp_path / "none", 1e9) is None


@given(st.binary(max_size=40).filter(lambda data: len(data) != 16))
def test_a_clock_that_is_half_written_is_no_hang(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("clock") / "0"
    path.write_bytes(data)
    assert overdue_s(path, 1e9) is None
