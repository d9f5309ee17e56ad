"""One progress reporter for all long work: a rich bar on a terminal, sparse plain lines anywhere else.

It writes to standard error, so that standard output stays free for results (`--json`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

BYTES = "B"
"""The unit whose figures are printed as decimal kB, MB, GB."""
_PREFIXES = ("", "k", "M", "G", "T", "P")


def amount_text(amount: float, unit: str) -> str:
    """`amount` with three digits and a decimal prefix, e.g. `1.23 GB`, `45.6k items`, `980 steps`."""
    scaled, power = float(amount), 0
    while abs(scaled) >= 999.5 and power < len(_PREFIXES) - 1:
        scaled, power = scaled / 1000, power + 1
    prefix = _PREFIXES[power]
    digits = f"{scaled:.3g}" if prefix or scaled != int(scaled) else f"{int(scaled)}"
    return f"{digits} {prefix}{unit}" if unit == BYTES else f"{digits}{prefix} {unit}"


def duration_text(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`; a day and more as `2d 3h`."""
    whole = max(0, round(seconds))
    if whole >= 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def status_text(done: int, total: int | None, unit: str, seconds: float, *, initial: int = 0, note: str = "") -> str:
    """`done of total (percent), rate, time left, note`; the `initial` work of an earlier process is not in the rate."""
    fresh = done - initial
    rate = fresh / seconds if seconds > 0 else 0.0
    if total is None:
        parts = [amount_text(done, unit)]
    else:
        share = 100 * done / total if total else 100.0
        parts = [f"{amount_text(done, unit)} of {amount_text(total, unit)} ({share:.0f} %)"]
    if fresh > 0:
        parts.append(f"{amount_text(rate, unit)}/s")
        if total is not None and done < total and rate > 0:
            parts.append(f"{duration_text((total - done) / rate)} left")
    if note:
        parts.append(note)
    return ", ".join(parts)


class Progress:
    """Reports how far a piece of work is, how fast it goes and how long it will still take; a context manager.

    `total` may be None (unknown) and `initial` is what an earlier process had finished already. `advance` may be called
    from any thread. Plain lines come at most every `interval_s` seconds, and one at the end.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        unit: str = "items",
        *,
        initial: int = 0,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = initial
        self._initial = initial
        self._note = ""
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._last_line = self._began
        self._bar: RichProgress | None = None
        self._bar_task = TaskID(0)

    def __enter__(self) -> Progress:
        self._began = self._last_line = self._clock()
        if self._terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[status]}"))
            self._bar = RichProgress(*columns, console=Console(file=self._stream, force_terminal=True), transient=True)
            self._bar_task = self._bar.add_task(self.label, total=self.total, completed=self.done, status=self.status())
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        seconds = self._clock() - self._began
        end = f"stopped after {duration_text(seconds)}" if kind else f"in {duration_text(seconds)}"
        self._line(f"{self.label}: {self.status()}, {end}")

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        """Count `amount` more units as done; `note` (kept until the next one) stands at the end of the line."""
        with self._lock:
            self.done += amount
            if note is not None:
                self._note = note
            if self._bar is not None:
                self._bar.update(self._bar_task, completed=self.done, status=self.status())
                return
            now = self._clock()
            if now - self._last_line < self._interval_s:
                return
            self._last_line = now
            self._line(f"{self.label}: {self.status()}")

    def status(self) -> str:
        """The text behind the label, as it stands now."""
        seconds = self._clock() - self._began
        return status_text(self.done, self.total, self.unit, seconds, initial=self._initial, note=self._note)

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
