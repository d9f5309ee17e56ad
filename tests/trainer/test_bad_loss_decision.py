"""What to do with a step whose loss is not finite or spikes: the decision alone."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.format.layout import ManifestId
from trainer.config import BadLossConfig
from trainer.run.start import rollback_candidates
from trainer.step.bad_loss import Action, BadStep, Decision, History, decide_step

SPIKES = BadLossConfig(action="skip", spike_deviations=6.0, spike_window=8)
KNOWN = History(losses=(1.0, 1.1, 0.9, 1.0), norms=(2.0, 2.2, 1.8, 2.0))
"""Half of the window of SPIKES: means 1 and 2, deviations 0.08 and 0.16."""


def after(
    rules: BadLossConfig, history: History, loss: float = 1.0, norm: float = 2.0, scaled: bool = False
) -> Decision:
    return decide_step(rules, history, loss, norm, scaled=scaled)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 2.0), (math.inf, 2.0), (1.0, math.nan), (1.0, math.inf)])
@pytest.mark.parametrize(
    ("action", "taken"), [("stop", Action.STOP), ("skip", Action.SKIP), ("roll_back", Action.ROLL_BACK)]
)
def test_step_that_is_not_finite_gets_the_configured_action(
    action: str, taken: Action, loss: float, norm: float
) -> None:
    rules = BadLossConfig.model_validate({"action": action})
    assert after(rules, History(), loss, norm).action is taken
    assert after(rules, History()).action is Action.APPLY


@pytest.mark.parametrize(
    ("loss", "norm", "taken"),
    [
        (1.4, 2.8, Action.APPLY),
        (1.5, 2.0, Action.SKIP),
        (1.0, 3.0, Action.SKIP),
        (0.1, 0.1, Action.APPLY),
    ],
)
def test_spike_is_a_value_far_above_the_last_ones(loss: float, norm: float, taken: Action) -> None:
    assert after(SPIKES, KNOWN, loss, norm).action is taken
    assert after(BadLossConfig(action="skip"), KNOWN, loss, norm).action is Action.APPLY


def test_no_spike_is_seen_before_half_of_the_window_is_known() -> None:
    short = History(losses=KNOWN.losses[1:], norms=KNOWN.norms[1:])
    assert after(SPIKES, short, 1e9, 1e9).action is Action.APPLY


def test_history_keeps_the_window_of_applied_steps_only() -> None:
    history = KNOWN
    for loss in (1.01, 1.02, math.nan, 50.0, 1.03, 1.04, 1.05):
        history = after(SPIKES, history, loss).history
    assert history.losses == (1.1, 0.9, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05)
    assert len(history.norms) == SPIKES.spike_window
    assert (history.skipped, history.skipped_in_row) == (2, 0)


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_overflow_under_a_loss_scaler_is_left_to_the_scaler(loss: float) -> None:
    decision = after(BadLossConfig(action="skip"), History(skipped_in_row=3), loss, math.inf, scaled=True)
    expected = (Action.APPLY, 3) if math.isfinite(loss) else (Action.SKIP, 4)
    assert (decision.action, decision.history.skipped_in_row) == expected


@settings(max_examples=50, deadline=None)
@given(bad=st.lists(st.booleans(), max_size=60), in_row=st.integers(1, 5), in_run=st.integers(1, 12))
def test_skips_end_at_the_first_limit_that_is_reached(bad: list[bool], in_row: int, in_run: int) -> None:
    rules = BadLossConfig(action="skip", max_skipped_in_row=in_row, max_skipped=in_run)
    history, run, total = History(), 0, 0
    for is_bad in bad:
        decision = after(rules, history, math.nan if is_bad else 1.0)
        if not is_bad:
            assert decision.action is Action.APPLY
            run = 0
        elif run == in_row or total == in_run:
            assert decision.action is Action.STOP
            return
        else:
            assert decision.action is Action.SKIP
            run, total = run + 1, total + 1
        history = decision.history


def test_roll_backs_end_at_their_limit() -> None:
    rules, history = BadLossConfig(action="roll_back", max_rollbacks=2), History()
    taken = []
    for _ in range(3):
        decision = after(rules, history, math.nan)
        taken.append(decision.action)
        history = History(skipped_in_row=7).after_rollback(decision.history)
        assert history.skipped_in_row == 0
    assert taken == [Action.ROLL_BACK, Action.ROLL_BACK, Action.STOP]


def test_history_comes_back_from_json_bit_for_bit() -> None:
    history = History(losses=(0.1 + 0.2, 1e-300), norms=(math.pi,), skipped_in_row=1, skipped=2, rollbacks=3)
    assert History.from_state(json.loads(json.dumps(history.to_state()))) == history
    assert History.from_state({}) == History()


def test_roll_back_passes_over_all_samples_up_to_those_beyond() -> None:
    bad = BadStep(step=9, loss=math.nan, grad_norm=1.0, reason="not finite", history=History())
    offset = bad.data_offset(8, to_step=6, global_batch=4, skip_batches=2)
    # Before, step 9 took the samples from 8 + 8 x 4 on; now step 7 takes those two batches and one more behind them.
    assert offset + 6 * 4 == (8 + 8 * 4) + (1 + 2) * 4


@pytest.mark.parametrize(("steps", "chosen"), [(1, [9, 6, 3]), (2, [6, 3]), (7, [3]), (100, [3, 6, 9])])
def test_roll_back_goes_at_least_the_configured_steps_if_it_can(steps: int, chosen: list[int]) -> None:
    live = [ManifestId(2, 9), ManifestId(1, 6), ManifestId(1, 3)]
    assert [manifest.step for manifest in rollback_candidates(live, 10, steps)] == chosen
