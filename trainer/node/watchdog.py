"""A watchdog over steps: each rank writes when its step began, 16 bytes in a file of its own, and the launcher reads them.

A rank that hangs in a collective or in its data says nothing and ends at a time-out, minutes later or never. The clock is
CLOCK_MONOTONIC, which all processes of a machine share (https://man7.org/linux/man-pages/man2/clock_gettime.2.html).
"""

from __future__ import annotations

import os
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

CLOCK = "LUSTRAIN_STEP_CLOCK"
"""Variable with the path of a rank's clock."""
MIN_HUNG_S = 120.0
TIMES_MEDIAN = 10
"""A step hangs that takes longer than MIN_HUNG_S and so many times the median."""
MEASURED = 16
MIN_MEASURED = 3
"""Steps that are measured before any is judged: the first ones compile."""
_FORM = struct.Struct("<dd")
"""When the step began, 0 between steps; the median of the last ones, 0 while too few are measured."""


class StepWatchdog:
    """The rank's side; does nothing without a path."""

    def __init__(self, path: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) if path else None
        self._seconds: deque[float] = deque(maxlen=MEASURED)
        self._began: float | None = None
        self._write(0.0)

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> StepWatchdog:
        return cls(environ.get(CLOCK) or None)

    def start_step(self) -> None:
        """Record that a step begins now."""
        self._began = self._clock()
        self._write(self._began)

    def end_step(self, seconds: float) -> None:
        """Record that it has ended; what comes before the next one (an evaluation, a save) may take as long as it needs."""
        self._seconds.append(seconds)
        self._began = None
        self._write(0.0)

    def age_s(self) -> float:
        """Return for how many seconds the step in progress has gone on, 0 between steps; any thread may ask."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def _write(self, began: float) -> None:
        if self._file is not None:
            median = statistics.median(self._seconds) if len(self._seconds) >= MIN_MEASURED else 0.0
            os.pwrite(self._file, _FORM.pack(began, median), 0)


def overdue_s(path: Path, now: float, min_s: float = MIN_HUNG_S) -> float | None:
    """Return for how many seconds the step of a rank has gone on, if that is too long; else None."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) != _FORM.size:
        return None
    began, median = _FORM.unpack(data)
    if not began or not median or now - began <= max(min_s, TIMES_MEDIAN * median):
        return None
    return float(now - began)
