"""The interval between saves, and the choice of a save when time runs out: pure arithmetic on measured seconds."""

from __future__ import annotations

import math
from typing import Literal

_WEIGHT = 0.3
"""Share of the newest measurement in the running averages: they settle in about ten steps, and one slow step hardly counts."""
_SHORTEST_STALL_S, _SHORTEST_STEP_S = 1e-3, 1e-6
"""Below these a measurement shows only that the clock is coarse."""


def young_daly(stall_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between saves that lose the least time to saving plus redoing.

    `stall_s` is what one save costs the loop, `mtbf_s` the mean time between interruptions, both > 0. To first order
    sqrt(2 x stall x MTBF) (Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974);
    the further terms matter where a stall is not small beside the MTBF (Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37).
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


_FIRST_STALL_S = 1.0
"""What a save is taken to cost until one was measured."""
_WARMUP_STEPS = 10
"""Steps before the first save of a derived interval: earlier ones are slower than those after them."""
_QUIET_SAVES = 3
"""A store that is busy with saves less than a third of the time has room for pruning and for slow saves."""


class Interval:
    """Decides "save at this step?", every fixed number of steps or from what steps and stalls were measured to cost.

    Measured times differ between ranks, so one rank decides and the others follow it.
    """

    def __init__(self, every_steps: int, mtbf_s: float, *, least_s: float = 0.0) -> None:
        """`every_steps` = 0 derives the interval, which is never shorter than `least_s`, nor than `_QUIET_SAVES` times what a
        whole save takes.
        """
        self._every_steps = every_steps
        self._mtbf_s = mtbf_s
        self._least_s = least_s
        self._stall_s: float | None = None
        self._step_s: float | None = None
        self._save_s = 0.0
        self._last_saved = 0

    def resumed(self, step: int) -> None:
        """Count from `step`, from whose checkpoint the run continues."""
        self._last_saved = step

    def measured_step(self, seconds: float) -> None:
        """Record how long a training step took, without any save in it."""
        self._step_s = _mix(self._step_s, seconds)

    def measured_stall(self, seconds: float) -> None:
        """Record how long a save blocked the loop."""
        self._stall_s = _mix(self._stall_s, seconds)

    def measured_save(self, seconds: float) -> None:
        """Record how long a save took from its call to its commit, beside the training."""
        self._save_s = seconds

    @property
    def steps(self) -> int:
        """Steps between saves as of now, at least 1."""
        if self._every_steps:
            return self._every_steps
        if self._step_s is None:
            return _WARMUP_STEPS
        stall = _FIRST_STALL_S if self._stall_s is None else self._stall_s
        seconds = max(young_daly(max(stall, _SHORTEST_STALL_S), self._mtbf_s), self._least_s)
        seconds = max(seconds, _QUIET_SAVES * self._save_s)
        return max(1, round(seconds / max(self._step_s, _SHORTEST_STEP_S)))

    def should_save(self, step: int) -> bool:
        """Return whether to save the state after `step`; a fixed interval saves at its multiples or soon after."""
        if self._every_steps:
            return step // self._every_steps > self._last_saved // self._every_steps
        return step - self._last_saved >= max(self.steps, _WARMUP_STEPS if self._stall_s is None else 1)

    def saved(self, step: int) -> None:
        """Record that a save of `step` was begun."""
        self._last_saved = max(self._last_saved, step)


def choose_on_notice(
    in_flight_remaining_s: float | None, new_save_s: float, left_s: float | None
) -> Literal["finish", "save"]:
    """Choose what to do on a notice: wait for the save in flight, or save the newest state now.

    All in seconds from now: until the save in flight commits (None: no save is in flight), until a new one would, and until
    the capacity ends (None: unknown). Finishing wins where it commits sooner, or where a new save cannot commit in time;
    call this again when it has committed, for the time that is left may suffice for the newest state too.
    """
    if in_flight_remaining_s is None:
        return "save"
    if in_flight_remaining_s <= new_save_s or (left_s is not None and new_save_s > left_s):
        return "finish"
    return "save"


def _mix(average: float | None, newest: float) -> float:
    return newest if average is None else (1 - _WEIGHT) * average + _WEIGHT * newest
