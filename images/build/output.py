"""The output of a build, read with a bound on silence."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator

from lustrain.problem import FAILED, UserError

FIRST_PAUSE_S = 30.0
LONGEST_SILENCE_S = 3600.0
"""Compressing the 5 GB of a CUDA image takes three silent minutes on two cores; twenty times that is a hang."""


def read_lines(
    source: Iterable[str],
    silent: Callable[[float], None],
    *,
    first_pause_s: float = FIRST_PAUSE_S,
    limit_s: float = LONGEST_SILENCE_S,
) -> Iterator[str]:
    """Yield the lines of `source`, which a thread of its own reads so that Ctrl-C acts at once.

    `silent` is called after `first_pause_s` seconds without a line, then after twice as many, and so on; UserError after
    `limit_s`.
    """
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in source:
                arrived.put(line)
        finally:
            arrived.put(None)

    threading.Thread(target=read, name="build output", daemon=True).start()
    waited, pause_s = 0.0, first_pause_s
    while True:
        try:
            line = arrived.get(timeout=min(pause_s, limit_s - waited))
        except queue.Empty:
            waited += pause_s
            if waited >= limit_s:
                why = f"the build printed nothing for {limit_s / 60:.0f} minutes and was ended"
                fix = "look at the engine's log, build again: what was done is cached"
                raise UserError(f"{why}; fix: {fix}", FAILED) from None
            silent(waited)
            pause_s = waited
            continue
        if line is None:
            return
        yield line
        waited, pause_s = 0.0, first_pause_s
