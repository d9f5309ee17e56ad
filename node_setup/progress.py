"""How far a run over many nodes is: a bar on a terminal, sparse plain lines anywhere else, always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


FEW = 4
"""Nodes that are waited for by name."""
LONGEST_PAUSE_S = 60.0


class Progress:
    """Counts nodes as they are done. Plain lines come at most every `interval_s` seconds, less and less often while nothing
    comes, and one at the end of a run that took longer than that; one thread calls it."""

    def __init__(
        self,
        label: str,
        names: Sequence[str],
        *,
        stream: TextIO | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.done, self.bad = label, len(names), 0, 0
        self._waited = dict.fromkeys(names)
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = self._pause_s = interval_s
        self._clock = clock
        self._began = self._last = clock()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._bar = _bar(self._stream)
            self._bar.add_task(self.label, total=self.total, status=self.status())
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._clock() - self._began >= self._interval_s:
            self._line(f"{self.status()}, {'stopped after' if kind else 'in'} {self._clock() - self._began:.0f} s")

    def node(self, name: str, good: bool) -> None:
        """One more node is done."""
        self.done += 1
        self.bad += not good
        self._waited.pop(name, None)
        self._pause_s = self._interval_s
        self._show()

    def beat(self) -> None:
        """Nothing came for a while, which is told as well."""
        if self._show():
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _show(self) -> bool:
        """Whether a plain line was due."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, status=self.status())
            return False
        due = self.done < self.total and self._clock() - self._last >= self._pause_s
        if due:
            self._last = self._clock()
            self._line(self.status())
        return due

    def status(self) -> str:
        """The text behind the label, as it stands now."""
        seconds = self._clock() - self._began
        rate = f", {self.done / seconds:.1f} nodes/s" if self.done and seconds > 0 else ""
        bad = f", {self.bad} not well" if self.bad else ""
        late = seconds >= self._interval_s and 0 < len(self._waited) <= FEW
        names = f", waiting for {', '.join(self._waited)}" if late else ""
        return f"{self.done} of {self.total} nodes{rate}{bad}{names}"

    def _line(self, text: str) -> None:
        self._stream.write(f"{self.label}: {text}\n")
        self._stream.flush()


def _bar(stream: TextIO) -> Bar:
    # 20 ms to load, which a run off a terminal has no use for.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    said = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}", markup=False),
    )
    columns = (SpinnerColumn(), *said, TimeElapsedColumn())
    return Progress(*columns, console=Console(file=stream), transient=True)
