"""What the process that supervises a run hears: a signal ends its wait, and is remembered."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from trainer.node.ranks import FORWARDED


class CaughtSignal:
    """The last signal that this process got, of those that go on to launchers."""

    def __init__(self, then: Callable[[int], None] = lambda number: None) -> None:
        """`then` is called in the handler, with the signal's number."""
        self.number = 0
        """0 for none."""
        self._then = then
        self._came = threading.Event()
        for number in FORWARDED:
            signal.signal(number, self._catch)

    def sleep(self, seconds: float) -> None:
        """Sleep, at most until a signal comes."""
        self._came.wait(seconds)
        self._came.clear()

    def stop_reason(self) -> str:
        """Return why the run shall stop; empty without a signal."""
        return f"{signal.Signals(self.number).name} ended it" if self.number else ""

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self._came.set()
        self._then(number)
