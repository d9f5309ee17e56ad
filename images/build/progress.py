"""Progress of a build or a push on standard error: running steps on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from images.model import Step, without_mounts
from lustrain.problem import plain
from lustrain.progress import LONGEST_PAUSE_S

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live as Screen

SLOW_S = 2.0
"""Steps that took longer are told one by one."""
LONGEST_NAME = 110
_SHOWN = 6
_MB = 1e6


class Live:
    """A Watch. Off a terminal: a line for each step that took more than 2 s or failed, and one at most every `interval_s`
    seconds in between, less and less often; sizes in MB of 10**6 bytes."""

    def __init__(
        self,
        label: str,
        *,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = self._pause_s = interval_s
        self._clock = clock
        self._began = self._last = clock()
        self._running: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._moved: dict[str, tuple[int, int]] = {}
        self._moving_since: float | None = None
        # By name: what the check made is cached for the image after it, and is no second step.
        self._ended: dict[str, bool] = {}
        self._screen: Screen | None = None

    def __enter__(self) -> Live:
        if self._stream.isatty():
            self._screen = _screen(self._stream, self._picture)
            self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._screen is not None:
            self._screen.stop()
            self._screen = None
        if kind is None and self._clock() - self._began >= self._interval_s:
            self._line(f"{self._counts()} in {self._clock() - self._began:.0f} s")

    def started(self, name: str) -> None:
        """As in Watch."""
        self._running.setdefault(name, self._clock())

    def ended(self, step: Step) -> None:
        """As in Watch."""
        self._running.pop(step.name, None)
        self._said.pop(step.name, None)
        self._ended.setdefault(step.name, step.cached)
        self._pause_s = self._interval_s
        if step.error:
            self._line(f"failed after {step.seconds:.1f} s: {_short(step.name)}")
        elif step.seconds > SLOW_S:
            self._line(f"{step.seconds:.1f} s: {_short(step.name)}")

    def log(self, name: str, text: str) -> None:
        """As in Watch."""
        if lines := [line for line in text.splitlines() if line.strip()]:
            self._said[name] = plain(lines[-1].strip())
        self._beat()

    def moved(self, name: str, done: int, total: int) -> None:
        """As in Watch."""
        if self._moving_since is None:
            self._moving_since = self._clock()
        self._moved[name] = (done, total)
        self._beat()

    def status(self) -> str:
        """Return the text behind the label, as it stands now."""
        now = self._clock()
        # The one that runs longest is what one waits for.
        running = sorted(self._running.items(), key=lambda one: one[1])[:1]
        parts = [self._counts(), *(f"{_short(name)} for {now - since:.0f} s" for name, since in running)]
        if running and (said := self._said.get(running[0][0])):
            parts.append(_short(said))
        return ", ".join(filter(None, [*parts, self._bytes(now)]))

    def _counts(self) -> str:
        # One step of the dictionary's own, so that the screen's thread sees it whole.
        ended = list(self._ended.values())
        cached = f" ({sum(ended)} cached)" if any(ended) else ""
        return f"{len(ended)} step{'s' * (len(ended) != 1)} done{cached}"

    def _bytes(self, now: float) -> str:
        sizes = list(self._moved.values())
        done, total = sum(one for one, _ in sizes), sum(max(one, all_of) for one, all_of in sizes)
        if done < 0.1 * _MB or self._moving_since is None:
            return ""
        seconds = now - self._moving_since
        rate = f", {done / _MB / seconds:.1f} MB/s" if seconds > 0 else ""
        return f"{done / _MB:.1f} of {total / _MB:.1f} MB{rate}"

    def _beat(self) -> None:
        if self._screen is None and self._clock() - self._last >= self._pause_s:
            self._line(self.status())
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _line(self, text: str) -> None:
        self._last = self._clock()
        if self._screen is not None:
            self._screen.console.print(f"{self.label}: {text}", markup=False, highlight=False, soft_wrap=True)
            return
        self._stream.write(f"{self.label}: {text}\n")
        self._stream.flush()

    def _picture(self) -> RenderableType:
        from rich.text import Text

        now = self._clock()
        head = ", ".join(filter(None, [self._counts(), self._bytes(now), f"{now - self._began:.0f} s"]))
        lines = [f"{self.label}: {head}"]
        for name, since in list(self._running.items())[-_SHOWN:]:
            said = self._said.get(name)
            lines.append(f"  {now - since:5.1f} s  {_short(name)}" + (f"  {_short(said)}" if said else ""))
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _short(text: str) -> str:
    shown = plain(without_mounts(text))
    return shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…"


def _screen(stream: TextIO, picture: Callable[[], RenderableType]) -> Screen:
    # 30 ms to load, which a build off a terminal has no use for.
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(file=stream)
    return Screen(get_renderable=picture, console=console, transient=True, refresh_per_second=5)
