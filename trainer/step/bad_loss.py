"""A step whose loss or gradient is not finite, or spikes: stop, skip it, or roll back. A pure decision; others carry it out.

Every rank decides alike: the loss is summed over the ranks, and the norm is that of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from lustrain.from_json import from_json
from trainer.config import BadLossConfig


class Action(Enum):
    """What to do with a step's update."""

    APPLY = "apply"
    SKIP = "skip"
    ROLL_BACK = "roll back"
    STOP = "stop"


@dataclass(frozen=True)
class History:
    """All that a decision depends on beside the step; every checkpoint holds it, so that a resume decides as before."""

    losses: tuple[float, ...] = ()
    """Of the last steps that were applied, oldest first; empty where spikes are not looked for."""
    norms: tuple[float, ...] = ()
    skipped_in_row: int = 0
    skipped: int = 0
    """Since the run began."""
    rollbacks: int = 0

    def to_state(self) -> dict[str, Any]:
        """Return JSON values that come back bit for bit."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """Read what `to_state` returned; what an older version did not store has its default."""
        return from_json(cls, state)

    def after_rollback(self, now: History) -> History:
        """Return this history, a checkpoint's, with the counts of the one that led back to it."""
        return replace(self, skipped_in_row=0, skipped=now.skipped, rollbacks=now.rollbacks)


@dataclass(frozen=True)
class Decision:
    """What to do with a step, why, and the history after it."""

    action: Action
    history: History
    reason: str = ""


@dataclass(frozen=True)
class BadStep:
    """The step that a roll back leads away from."""

    step: int
    loss: float
    grad_norm: float
    reason: str
    history: History

    def data_offset(self, before: int, *, to_step: int, global_batch: int, skip_batches: int) -> int:
        """Return by how many samples the run is ahead of its steps after the roll back; `before` counts those so far.

        The step after `to_step` takes the samples that come `skip_batches` global batches after those of the bad step.
        """
        return before + (self.step - to_step + skip_batches) * global_batch


def decide_step(rules: BadLossConfig, history: History, loss: float, norm: float, *, scaled: bool) -> Decision:
    """Decide about a step with this mean loss and gradient norm.

    With a loss scaler (`scaled`) the scaler handles an infinite norm, and the history does not count it.
    """
    overflowed = scaled and math.isfinite(loss) and not math.isfinite(norm)
    if overflowed:
        return Decision(Action.APPLY, history)
    reason = _what_is_wrong(rules, history, loss, norm)
    if not reason:
        return Decision(Action.APPLY, _with_applied(rules, history, loss, norm))
    if rules.action == "skip":
        if history.skipped_in_row >= rules.max_skipped_in_row:
            reason = f"{reason}, after {history.skipped_in_row} skipped steps in a row (bad_loss.max_skipped_in_row)"
            return Decision(Action.STOP, history, reason)
        if history.skipped >= rules.max_skipped:
            reason = f"{reason}, after {history.skipped} skipped steps of this run (bad_loss.max_skipped)"
            return Decision(Action.STOP, history, reason)
        counted = replace(history, skipped_in_row=history.skipped_in_row + 1, skipped=history.skipped + 1)
        return Decision(Action.SKIP, counted, reason)
    if rules.action == "roll_back":
        if history.rollbacks >= rules.max_rollbacks:
            reason = f"{reason}, after {history.rollbacks} roll backs of this run (bad_loss.max_rollbacks)"
            return Decision(Action.STOP, history, reason)
        return Decision(Action.ROLL_BACK, replace(history, rollbacks=history.rollbacks + 1), reason)
    return Decision(Action.STOP, history, reason)


def _what_is_wrong(rules: BadLossConfig, history: History, loss: float, norm: float) -> str:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "not finite"
    if rules.spike_deviations:
        for name, value, earlier in (("loss", loss, history.losses), ("gradient norm", norm, history.norms)):
            if is_spike(value, earlier, rules):
                return f"the {name} is a spike"
    return ""


def is_spike(value: float, earlier: Sequence[float], rules: BadLossConfig) -> bool:
    """Whether a value lies more than `spike_deviations` standard deviations above the mean of the earlier ones.

    As in OLMo's SkipStepOptimizer, nothing is a spike before half of the window is known
    (https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim/skip_step_optimizer.py).
    """
    if len(earlier) < max(2, rules.spike_window // 2):
        return False
    mean = math.fsum(earlier) / len(earlier)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in earlier) / (len(earlier) - 1))
    return value - mean > rules.spike_deviations * deviation


def _with_applied(rules: BadLossConfig, history: History, loss: float, norm: float) -> History:
    if not rules.spike_deviations:
        return History(skipped=history.skipped, rollbacks=history.rollbacks)
    return replace(
        history,
        losses=(*history.losses, loss)[-rules.spike_window :],
        norms=(*history.norms, norm)[-rules.spike_window :],
        skipped_in_row=0,
    )
