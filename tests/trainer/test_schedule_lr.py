"""The learning rate is a bounded, unbroken function of the step and agrees with torch's schedulers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import ScheduleConfig
from trainer.step.schedule import lr_at, problems

BASE = 0.01
LINEAR = ScheduleConfig(kind="linear", min_lr_ratio=0.25)
KINDS = ["constant", "cosine", "linear", "wsd", "onecycle"]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    total = draw(st.integers(1, 400))
    kind = draw(st.sampled_from(KINDS))
    config = ScheduleConfig(
        kind=kind,
        warmup_steps=0 if kind == "onecycle" else draw(st.integers(0, total)),
        min_lr_ratio=draw(st.floats(0, 1)),
        decay_fraction=draw(st.floats(0.01, 1)),
        peak_fraction=draw(st.floats(0.01, 0.99)),
        initial_lr_ratio=draw(st.floats(0.01, 1)),
    )
    return config, total


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(schedules())
def test_the_rate_rises_to_the_base_then_falls_within_its_bounds(case: tuple[ScheduleConfig, int]) -> None:
    config, total = case
    rates = [lr_at(step, config, total, BASE) for step in range(1, total + 1)]
    floor = BASE * min(config.min_lr_ratio, config.initial_lr_ratio if config.kind == "onecycle" else 1)
    assert all(rate <= BASE for rate in rates)
    assert all(rate >= floor for rate in rates[config.warmup_steps :])
    top = rates.index(max(rates))
    rounding = 1e-15 * BASE
    assert all(a <= b + rounding for a, b in itertools.pairwise(rates[: top + 1]))
    assert all(a >= b - rounding for a, b in itertools.pairwise(rates[top:]))


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(1, 10**9))
def test_past_the_end_the_rate_stays_at_its_last_value(case: tuple[ScheduleConfig, int], beyond: int) -> None:
    config, total = case
    last = lr_at(total + 1, config, total, BASE)
    assert lr_at(total + beyond, config, total, BASE) == last
    if config.kind not in ("constant",) and config.warmup_steps < total:
        assert last == pytest.approx(BASE * config.min_lr_ratio, abs=1e-12)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_ends_at_the_base_rate_without_a_jump(kind: str) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=7)
    assert lr_at(1, config, 400, BASE) == pytest.approx(BASE / 7)
    assert lr_at(7, config, 400, BASE) == lr_at(8, config, 400, BASE) == BASE
    assert lr_at(9, config, 400, BASE) == pytest.approx(BASE, rel=0.01)


def torch_rates(make: type, steps: int, **options: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE, momentum=0.9)
    scheduler = make(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("config", "make", "options"),
    [
        (ScheduleConfig(), torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 100, "eta_min": BASE * 0.1}),
        (LINEAR, torch.optim.lr_scheduler.LinearLR, {"start_factor": 1.0, "end_factor": 0.25, "total_iters": 100}),
    ],
)
def test_cosine_and_linear_are_torchs(config: ScheduleConfig, make: type, options: dict[str, float]) -> None:
    found = [lr_at(step, config, 100, BASE) for step in range(1, 101)]
    assert found == pytest.approx(torch_rates(make, 100, **options), rel=1e-9)


@pytest.mark.parametrize("peak_fraction", [0.3, 0.5])
def test_onecycle_is_torchs_onecycle_but_may_be_prolonged(peak_fraction: float) -> None:
    config = ScheduleConfig(kind="onecycle", min_lr_ratio=0.001, peak_fraction=peak_fraction, initial_lr_ratio=0.04)
    options = {"max_lr": BASE, "total_steps": 100, "pct_start": peak_fraction, "div_factor": 25, "final_div_factor": 40}
    expected = torch_rates(torch.optim.lr_scheduler.OneCycleLR, 99, **options)
    assert [lr_at(step, config, 100, BASE) for step in range(1, 100)] == pytest.approx(expected, rel=1e-9)
    assert lr_at(100, config, 100, BASE) == lr_at(500, config, 100, BASE) == pytest.approx(BASE * 0.001)


def test_wsd_holds_the_base_rate_until_the_decay_begins() -> None:
    config = ScheduleConfig(kind="wsd", warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0)
    assert {lr_at(step, config, 100, BASE) for step in range(10, 82)} == {BASE}
    assert lr_at(91, config, 100, BASE) == pytest.approx(BASE / 2)
    assert lr_at(101, config, 100, BASE) == 0.0


def test_the_configured_total_wins_over_the_runs_length() -> None:
    config = ScheduleConfig(kind="linear", total_steps=50, min_lr_ratio=0.0)
    assert lr_at(26, config, 1000, BASE) == pytest.approx(BASE / 2)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (ScheduleConfig(kind="cosine", warmup_steps=100), "schedule.warmup_steps"),
        (ScheduleConfig(kind="onecycle", warmup_steps=1), "schedule.warmup_steps"),
        (ScheduleConfig(kind="wsd", warmup_steps=60, decay_fraction=0.5), "schedule.decay_fraction"),
    ],
)
def test_a_meaningless_schedule_is_named(config: ScheduleConfig, path: str) -> None:
    assert [line.split(" = ")[0] for line in problems(config, 100)] == [path]
    assert problems(ScheduleConfig(kind=config.kind), 100) == []
