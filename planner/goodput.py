"""What interruptions cost a run, and how often to save: goodput is the time of steps that count, of all time.

Interruptions come without notice and independently of each other, at any moment, also while the run starts again. A notice
that leaves time for a save makes a run lose less than this says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.checkpoint.save.interval import Interval, young_daly
from trainer.config import CheckpointConfig


@dataclass(frozen=True)
class Losses:
    """Seconds: between interruptions of the job on average, from one to the first new step, of each save's stall, and from
    the begin of a save to its commit."""

    mtbf_s: float
    restart_s: float
    stall_s: float
    commit_s: float


def goodput(interval_s: float, losses: Losses) -> float:
    """Return the share of time that is training that counts, with `interval_s` of training between saves.

    Daly's expected time with exponential interruptions, M e^(R/M) (e^((t + d)/M) - 1) for each interval t
    (https://doi.org/10.1016/j.future.2004.11.016, equation 20). A save that is written beside the training is of no use until
    its commit, so that each interruption repeats that time too: it counts as part of the restart R.
    """
    mtbf = losses.mtbf_s
    lost = (losses.restart_s + losses.commit_s) / mtbf
    exponent = (interval_s + losses.stall_s) / mtbf
    if lost + exponent > 700:  # Beyond it e^x is no float: such a run never gets on.
        return 0.0
    return interval_s / (mtbf * math.exp(lost) * math.expm1(exponent))


def best_interval_s(losses: Losses) -> float:
    """Return the seconds of training between saves that lose least: Young and Daly's, but no save before the last commits."""
    return max(young_daly(max(losses.stall_s, 1e-3), losses.mtbf_s), losses.commit_s)


def trainers_interval_s(config: CheckpointConfig, losses: Losses, step_s: float) -> float:
    """Return what the trainer itself would choose from the same measurements, a whole number of steps."""
    rule = Interval(config.every_steps, config.mtbf_hours * 3600, least_s=config.least_seconds)
    rule.measured_step(step_s)
    rule.measured_stall(losses.stall_s)
    rule.measured_save(losses.commit_s)
    return rule.steps * step_s
