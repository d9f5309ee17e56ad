"""Goodput: the share of a run's wall time, pauses included, that went into steps which still count. Pure.

The term is Google's, whose definition also counts starts, repeated steps and pauses as lost
(https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any


def seconds_of(record: Mapping[str, Any]) -> float:
    """Return the seconds of a step and of the evaluation after it; those of a save are beside them."""
    return float(record["step_seconds"]) + float(record.get("eval_seconds", 0.0))


class KeptSeconds:
    """The seconds of each step of a run's history, from its records in the order in which they were logged.

    A generation replaces everything older from its first step on, as in `trainer.metrics.reader.merge_steps`; here a step takes
    8 bytes, so that a process that trains can go through a run of millions of steps.
    """

    def __init__(self) -> None:
        self._seconds = array("d")
        self._is_first = True

    def begin_generation(self) -> None:
        self._is_first = True

    def add(self, record: Mapping[str, Any]) -> None:
        at = int(record["step"]) - 1
        if self._is_first:
            del self._seconds[at:]
            self._is_first = False
        if at >= len(self._seconds):
            # Records between may be damaged, and are then lost time.
            self._seconds.extend([0.0] * (at + 1 - len(self._seconds)))
        self._seconds[at] = seconds_of(record)

    def total(self, step: int | None = None) -> float:
        """Sum them up to `step`, or all."""
        return sum(self._seconds[:step])


def useful_seconds(generations: Iterable[Iterable[Mapping[str, Any]]]) -> float:
    """Sum the steps and evaluations that count, from the step records of each generation, oldest first."""
    kept = KeptSeconds()
    for records in generations:
        kept.begin_generation()
        for record in records:
            kept.add(record)
    return kept.total()


def by_step(history: Sequence[Mapping[str, Any]], began: float | None) -> list[float]:
    """Return the goodput at each record of a run's history, each step once: where it stood when that step had ended.

    `began` is in Unix seconds. Empty where nothing says when the run or its steps were.
    """
    if began is None or any("time" not in record or "step_seconds" not in record for record in history):
        return []
    useful = accumulate(map(seconds_of, history))
    times = (datetime.fromisoformat(record["time"]).timestamp() for record in history)
    shares = (goodput(useful_s, began, time) for useful_s, time in zip(useful, times, strict=True))
    return [math.nan if share is None else share for share in shares]


def goodput(useful_s: float, began: float, now: float) -> float | None:
    """Return the share from 0 to 1 since the run began; times are Unix seconds. None where no time has passed."""
    return min(1.0, useful_s / (now - began)) if now > began else None
