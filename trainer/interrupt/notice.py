"""One notice, and which of two matters more: plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

OnEvent = Callable[[str, dict[str, Any]], None]
"""Receives (kind, fields) from the polling thread; must be thread-safe and quick."""


@dataclass(frozen=True)
class Notice:
    """Why the run should save and stop."""

    source: str
    """`signal`, `spot`, `rebalance`, `autoscaling`, `deadline` or `stop-file`."""
    detail: str
    deadline: float | None
    """`time.monotonic()` seconds at which the capacity is gone; None when nobody says."""

    def remaining(self, now: float) -> float | None:
        """Seconds left at monotonic time `now`, never below 0; None when the deadline is unknown."""
        return None if self.deadline is None else max(0.0, self.deadline - now)


class Poller(Protocol):
    """Something to look at every few seconds; it reports its own troubles and never raises for them."""

    def poll(self) -> Notice | None: ...


def nearer(current: Notice | None, new: Notice | None) -> Notice | None:
    """The notice to act on: the first one stays unless the new one leaves less time; an unknown deadline counts as far."""
    if current is None or new is None:
        return current or new
    if new.deadline is None or (current.deadline is not None and current.deadline <= new.deadline):
        return current
    return new
