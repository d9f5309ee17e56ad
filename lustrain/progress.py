"""One progress reporter for all long work: a rich bar on a terminal, sparse plain lines anywhere else.

It writes to standard error, so that standard output stays free for results (`--json`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

BYTES = "B"
"""The unit whose figures are printed as decimal kB, MB, GB."""
LONGEST_PAUSE_S = 60.0
FEW = 4
"""Open items that are named."""
_PREFIXES = ("", "k", "M", "G", "T", "P")


def amount_text(amount: float, unit: str) -> str:
    """Write `amount` with three digits and a decimal prefix, e.g. `1.23 GB`, `45.6k items`, `980 steps`."""
    scaled, power = float(amount), 0
    while abs(scaled) >= 999.5 and power < len(_PREFIXES) - 1:
        scaled, power = scaled / 1000, power + 1
    prefix = _PREFIXES[power]
    digits = f"{scaled:.3g}" if prefix or scaled != int(scaled) else f"{int(scaled)}"
    return f"{digits} {prefix}{unit}" if unit == BYTES else f"{digits}{prefix} {unit}"


def duration_text(seconds: float) -> str:
    """Write `46s`, `10m 55s`, `3h 58m`, `32d 23h`: the two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600}h"


def print_line(line: str) -> None:
    """Print one line about work that goes on, with the mark by which it is known between other programs' lines."""
    print(f"lustrain: {line}", file=sys.stderr, flush=True)


def status_text(done: int, total: int | None, unit: str, seconds: float, *, initial: int = 0, note: str = "") -> str:
    """`done of total (percent), rate, time left, note`; the `initial` work of an earlier process is not in the rate."""
    fresh = done - initial
    rate = fresh / seconds if seconds > 0 else 0.0
    if total is None:
        parts = [amount_text(done, unit)]
    else:
        share = 100 * done / total if total else 100.0
        part = amount_text(done, unit) if unit == BYTES else amount_text(done, unit).removesuffix(f" {unit}")
        parts = [f"{part} of {amount_text(total, unit)} ({share:.0f} %)"]
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
    from any thread. Plain lines come at most every `interval_s` seconds, and one at the end; with `brief` none at all where
    the work took less than that. The last few of the names in `waiting` are shown.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        unit: str = "items",
        *,
        initial: int = 0,
        waiting: Iterable[str] = (),
        brief: bool = False,
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
        self._waiting = dict.fromkeys(waiting)
        self._brief = brief
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._interval_s = self._pause_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._last_line = self._began
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        self._began = self._last_line = self._clock()
        if self._terminal:
            self._bar = _bar(self._stream, self.total is not None, self.status)
            self._bar.add_task(self.label, total=self.total, completed=self.done)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        seconds = self._clock() - self._began
        if self._brief and seconds < self._interval_s:
            return
        end = f"stopped after {duration_text(seconds)}" if kind else f"in {duration_text(seconds)}"
        self._line(f"{self.status()}, {end}")

    def advance(self, amount: int = 1, note: str | None = None, name: str | None = None) -> None:
        """Count `amount` more units as done; `note` (kept until the next one) stands at the end of the line.

        `name` is one of `waiting`, which is done.
        """
        with self._lock:
            self.done += amount
            self._waiting.pop(name or "", None)
            self._pause_s = self._interval_s
            if note is not None:
                self._note = note
            self._show()

    def tick(self) -> None:
        """Show that the work goes on though nothing was done; the pause until the next such line doubles."""
        with self._lock:
            if self._show():
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _show(self) -> bool:
        """Return whether a plain line was due."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)
            return False
        now = self._clock()
        due = now - self._last_line >= self._pause_s
        if due:
            self._last_line = now
            self._line(self.status())
        return due

    def status(self) -> str:
        """Return the text behind the label, as it stands now."""
        seconds = self._clock() - self._began
        late = seconds >= self._interval_s and 0 < len(self._waiting) <= FEW
        names = f"waiting for {', '.join(self._waiting)}" if late else ""
        note = ", ".join(filter(None, (self._note, names)))
        return status_text(self.done, self.total, self.unit, seconds, initial=self._initial, note=note)

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar; the next plain line comes after a whole pause."""
        with self._lock:
            self._pause_s, self._last_line = self._interval_s, self._clock()
            if self._bar is not None:
                self._bar.console.print(f"{self.label}: {text}", markup=False, highlight=False, soft_wrap=True)
            else:
                self._line(text)

    def _line(self, text: str) -> None:
        self._stream.write(f"{self.label}: {text}\n")
        self._stream.flush()


def _bar(stream: TextIO, known: bool, status: Callable[[], str]) -> RichProgress:
    # Rich takes 20 ms to load, which a run off a terminal has no use for.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    class Status(ProgressColumn):
        """The status as it is when the terminal is drawn, so that its times go on while nothing is done."""

        def render(self, task: Task) -> Text:
            return Text(status())

    columns = (TextColumn("{task.description}"), BarColumn(24) if known else SpinnerColumn(), Status())
    return Progress(*columns, console=Console(file=stream, force_terminal=True), transient=True)
