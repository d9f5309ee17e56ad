"""Goodput: the share of a run's wall time, pauses included, that went into steps which still count.

The term is Google's, whose definition also counts starts, repeated steps and pauses as lost
(https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity).
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, Protocol


class RunPast(Protocol):
    """What the run did before this generation (`trainer.run.past.Past`)."""

    @property
    def began(self) -> float | None:
        """Return Unix seconds, None where nothing is recorded yet."""

    @property
    def useful_s(self) -> float:
        """Return the seconds of steps that still count."""

    @property
    def interruptions(self) -> int:
        """Return how often the run was interrupted."""


class LiveGoodput:
    """The goodput of a run that trains, for those who show it; `clock` gives Unix seconds. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._started = clock, clock()
        self._lock = threading.Lock()
        self._generation, self._useful_s = 0, 0.0
        self._past: RunPast | None = None

    def begin_generation(self, generation: int) -> None:
        """Count useful seconds from 0: the generation begins from a checkpoint, and `set_past` says what was before it."""
        with self._lock:
            self._generation, self._useful_s, self._past = generation, 0.0, None

    def set_past(self, generation: int, past: RunPast) -> bool:
        """Take in what the run did before `generation`; return False where another one has begun meanwhile."""
        with self._lock:
            if generation != self._generation:
                return False
            self._past = past
            return True

    def step(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._useful_s += seconds_of(record)

    @property
    def interruptions(self) -> int | None:
        """Return those before this generation, None while its past is being read."""
        with self._lock:
            return None if self._past is None else self._past.interruptions

    def value(self) -> float | None:
        """Return the share from 0 to 1, None while the past of a new generation is being read."""
        with self._lock:
            past, useful_s = self._past, self._useful_s
        if past is None:
            return None
        return goodput(past.useful_s + useful_s, self._started if past.began is None else past.began, self._clock())


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
