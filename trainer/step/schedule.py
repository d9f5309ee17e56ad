"""The learning rate as a pure function of the global step, so that nothing about it needs to be saved or resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lustrain.problem import problem
from trainer.config import ScheduleConfig


def lr_at(step: int, config: ScheduleConfig, total_steps: int, base_lr: float) -> float:
    """Return the rate of optimizer step `step` (the first is 1); `config.total_steps` overrides `total_steps`.

    Warm-up rises linearly and reaches `base_lr` at step `warmup_steps`. What follows is a function of the steps already done,
    step - 1, as in torch's schedulers: `lr_at(t + 1)` equals CosineAnnealingLR and OneCycleLR after t calls of `step()`. Past
    the end the rate stays at its last value.
    """
    total = config.total_steps or total_steps
    done = min(max(step, 1) - 1, total)
    if config.kind == "onecycle":
        return base_lr * _onecycle(done, total, config)
    if step <= config.warmup_steps:
        return base_lr * (max(step, 1) / config.warmup_steps)
    progress = (done - config.warmup_steps) / max(total - config.warmup_steps, 1)
    return base_lr * _SHAPES[config.kind](min(max(progress, 0.0), 1.0), config, total)


def problems(config: ScheduleConfig, total_steps: int) -> Sequence[str]:
    """Return one line for each setting that makes a schedule meaningless for so many steps."""
    total = config.total_steps or total_steps
    lines = []
    if config.kind == "onecycle" and config.warmup_steps:
        why = "onecycle brings its own warm-up, schedule.peak_fraction"
        lines.append(problem("schedule.warmup_steps", config.warmup_steps, why, allowed="0", fix="leave it out"))
    elif config.warmup_steps >= total:
        why = f"warm-up would not end within the {total} steps of the schedule"
        allowed = f"0 .. {total - 1}"
        lines.append(
            problem("schedule.warmup_steps", config.warmup_steps, why, allowed=allowed, fix="shorten the warm-up")
        )
    elif config.kind == "wsd" and config.warmup_steps > (1 - config.decay_fraction) * total:
        why = f"the decay would begin at step {(1 - config.decay_fraction) * total:.0f} of {total}, before warm-up ends"
        largest = 1 - config.warmup_steps / total
        fix = "shorten the warm-up or the decay"
        lines.append(
            problem("schedule.decay_fraction", config.decay_fraction, why, allowed=f"<= {largest:.4g}", fix=fix)
        )
    return lines


def _constant(progress: float, config: ScheduleConfig, total: int) -> float:
    return 1.0


def _cosine(progress: float, config: ScheduleConfig, total: int) -> float:
    """https://arxiv.org/abs/1608.03983 without restarts."""
    return _between(1.0, config.min_lr_ratio, (1 - math.cos(math.pi * progress)) / 2)


def _linear(progress: float, config: ScheduleConfig, total: int) -> float:
    return _between(1.0, config.min_lr_ratio, progress)


def _wsd(progress: float, config: ScheduleConfig, total: int) -> float:
    """Warm-up, stable, decay (https://arxiv.org/abs/2404.06395), the decay linear (https://arxiv.org/abs/2405.18392)."""
    decay = min(config.decay_fraction * total / max(total - config.warmup_steps, 1), 1.0)
    return _between(1.0, config.min_lr_ratio, max(0.0, (progress - (1 - decay)) / decay))


_SHAPES: dict[str, Callable[[float, ScheduleConfig, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
}


def _onecycle(done: int, total: int, config: ScheduleConfig) -> float:
    """Cosine up to the peak and down again (https://arxiv.org/abs/1708.07120); its phases end where torch's do."""
    peak, last = config.peak_fraction * total - 1, total - 1
    if done < peak:
        return _between(config.initial_lr_ratio, 1.0, (1 - math.cos(math.pi * done / peak)) / 2)
    progress = min((done - peak) / (last - peak), 1.0)
    return _between(1.0, config.min_lr_ratio, (1 - math.cos(math.pi * progress)) / 2)


def _between(start: float, end: float, part: float) -> float:
    """From `start` to `end`, meeting both exactly and never leaving their interval."""
    value = start * (1.0 - part) + end * part
    return min(max(value, min(start, end)), max(start, end))
