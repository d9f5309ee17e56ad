"""One notice, and which of two matters more: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

OnEvent = Callable[[str, dict[str, Any]], None]
"""Receives (kind, fields) from the polling thread; must be thread-safe and quick."""
_FROM_AWS = ("spot", "rebalance", "autoscaling")
_FIRST = {"stop-file": "remove the stop file, then ", "deadline": "set a later interrupt.deadline, then "}


@dataclass(frozen=True)
class Notice:
    """Why the run should save and stop."""

    source: str
    """`signal`, `spot`, `rebalance`, `autoscaling`, `deadline`, `stop-file`, `saves` or `data`."""
    detail: str
    deadline: float | None
    """`time.monotonic()` seconds at which the capacity ends; None when that is unknown."""

    @property
    def summary(self) -> str:
        """What stops the run, for people: `SIGINT`, `spot notice (terminate at …)`, `stop file (/x exists)`."""
        if self.source in ("signal", "saves", "data"):
            return self.detail
        name = self.source.replace("-", " ")
        return f"{name} notice ({self.detail})" if name in _FROM_AWS else f"{name} ({self.detail})"

    @property
    def advice(self) -> str:
        """What the user does to go on; a deadline that is over and a stop file would stop the next start too."""
        return f"{_FIRST.get(self.source, '')}start the same command again to go on"

    def remaining(self, now: float) -> float | None:
        """Seconds left at monotonic time `now`, never below 0; None when the deadline is unknown."""
        return None if self.deadline is None else max(0.0, self.deadline - now)


class Poller(Protocol):
    """A source that is polled every few seconds; it reports its own failures and never raises for them."""

    def poll(self) -> Notice | None: ...


def nearer(current: Notice | None, new: Notice | None) -> Notice | None:
    """Return the notice to act on: the first one, unless the new one leaves less time; an unknown deadline counts as far."""
    if current is None or new is None:
        return current or new
    if new.deadline is None or (current.deadline is not None and current.deadline <= new.deadline):
        return current
    return new
