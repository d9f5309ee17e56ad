"""The output of a build, read with a bound on silence."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lustrain.problem import FAILED, UserError

FIRST_PAUSE_S = 30.0
LONGEST_SILENCE_S = 3600.0
"""Compressing the 5 GB of a CUDA image takes three silent minutes on two cores; twenty times that is a hang."""

T = TypeVar("T")


def heard(
    source: Iterable[T],
    silent: Callable[[float], None],
    *,
    first_pause_s: float = FIRST_PAUSE_S,
    limit_s: float = LONGEST_SILENCE_S,
) -> Iterator[T]:
    """What comes from `source`, which a thread of its own reads so that Ctrl-C is heard at once. `silent` is told after
    `first_pause_s` seconds without anything, then after twice as many, and so on; UserError after `limit_s`."""
    arrived: queue.Queue[tuple[T] | BaseException | None] = queue.Queue()

    def read() -> None:
        try:
            for item in source:
                arrived.put((item,))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that asked
            arrived.put(error)
        else:
            arrived.put(None)

    threading.Thread(target=read, name="build output", daemon=True).start()
    while True:
        found = _next(arrived, silent, first_pause_s, limit_s)
        if found is None:
            return
        if isinstance(found, BaseException):
            raise found
        yield found[0]


def _next(
    arrived: queue.Queue[tuple[T] | BaseException | None],
    silent: Callable[[float], None],
    pause_s: float,
    limit_s: float,
) -> tuple[T] | BaseException | None:
    waited = 0.0
    while True:
        try:
            return arrived.get(timeout=min(pause_s, limit_s - waited))
        except queue.Empty:
            waited += pause_s
            if waited >= limit_s:
                why = f"the build printed nothing for {limit_s / 60:.0f} minutes and was ended"
                fix = "look at the engine's log, build again: what was done is cached"
                raise UserError(f"{why}; fix: {fix}", FAILED) from None
            silent(waited)
            pause_s = waited
