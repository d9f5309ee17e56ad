"""Goodput and the interval between saves, held against runs that are interrupted at random, event by event."""

from __future__ import annotations

import math
import random

import pytest

from planner.goodput import Losses, best_interval_s, goodput, trainers_interval_s
from trainer.config import CheckpointConfig

HOUR = 3600.0
INTERRUPTIONS = 6_000


def simulated_goodput(interval_s: float, losses: Losses, seed: int) -> float:
    """Train, save and be interrupted until many interruptions are over; return the time of steps that count, of all time.

    The checkpoint of `interval_s` of training begins after them, stops training for the stall, and counts from its commit on.
    An interruption during the restart begins the restart anew. No processes, no clock: moments are drawn and compared.
    """
    draw = random.Random(seed)
    now, done = 0.0, 0.0  # Wall time, and seconds of training that are committed.
    for _ in range(INTERRUPTIONS):
        ends = now + draw.expovariate(1 / losses.mtbf_s)
        start = now + losses.restart_s
        if ends > start:
            # Saves of this attempt begin each interval + stall; those that commit before its end count.
            period = interval_s + losses.stall_s
            committed = (ends - start - interval_s - losses.commit_s) / period
            done += interval_s * (math.floor(committed) + 1 if committed >= 0 else 0)
        now = ends
    return done / now


CASES = [
    pytest.param(Losses(24 * HOUR, 300, 0.1, 20), 600, id="block"),
    pytest.param(Losses(4 * HOUR, 300, 0.5, 30), 120, id="spot"),
    pytest.param(Losses(4 * HOUR, 300, 10, 30), 60, id="saves-too-often"),
    pytest.param(Losses(2 * HOUR, 300, 1, 900), 1_200, id="slow-commit"),
    pytest.param(Losses(1 * HOUR, 1_200, 5, 60), 600, id="slow-restart"),
    pytest.param(Losses(1 * HOUR, 60, 1, 5), 5_400, id="saves-too-seldom"),
]


@pytest.mark.parametrize(("losses", "interval_s"), CASES)
def test_goodput_is_that_of_simulated_interruptions(losses: Losses, interval_s: float) -> None:
    simulated = simulated_goodput(interval_s, losses, seed=7)
    assert goodput(interval_s, losses) == pytest.approx(simulated, abs=0.02)


@pytest.mark.parametrize(("losses", "interval_s"), CASES)
def test_no_interval_loses_clearly_less_than_the_best(losses: Losses, interval_s: float) -> None:
    at_best = goodput(best_interval_s(losses), losses)
    tried = [losses.commit_s + 1.05**power for power in range(1, 240)]
    assert at_best >= max(goodput(one, losses) for one in tried) - 0.002
    assert at_best >= goodput(interval_s, losses) - 1e-9 or interval_s < losses.commit_s


def test_a_run_that_never_gets_on_has_no_goodput() -> None:
    assert goodput(60, Losses(1, 10_000, 1, 1)) == 0


@pytest.mark.parametrize(
    ("settings", "losses", "expected"),
    [
        ({"every_steps": 40}, Losses(4 * HOUR, 300, 0.1, 5), 400),
        ({}, Losses(4 * HOUR, 300, 0.001, 5), 60),
        ({}, Losses(4 * HOUR, 300, 0.001, 200), 600),
        ({"least_seconds": 0.0, "mtbf_hours": 1.0}, Losses(4 * HOUR, 300, 2.0, 5), 120),
    ],
)
def test_the_trainers_interval_is_its_own_rule(settings: dict[str, float], losses: Losses, expected: float) -> None:
    """Fixed, at least `least_seconds`, three times a save, or Young and Daly's by the configured `mtbf_hours`."""
    assert trainers_interval_s(CheckpointConfig(**settings), losses, 10.0) == expected  # type: ignore[arg-type]
