"""One notice, and which of two matters more: plain data."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from lustrain.capacity_events import NODE_SOURCES

OnEvent = Callable[[str, dict[str, Any]], None]
"""Receives (kind, fields) from the polling thread; must be thread-safe and quick."""
_FIRST = {"stop-file": "remove the stop file, then ", "deadline": "set a later interrupt.deadline, then "}


@dataclass(frozen=True)
class Notice:
    """Why the run should save and stop."""

    source: str
    """`signal`, `deadline`, `stop-file`, `saves`, `data`, or one of NODE_SOURCES."""
    detail: str
    deadline: float | None
    """`time.monotonic()` seconds at which the capacity ends; None when that is unknown."""
    instance_id: str | None = None
    """Of the EC2 instance that ends; None where the source names none."""
    host: str | None = None
    """The node that it is about; None for this one."""

    @property
    def summary(self) -> str:
        """What stops the run, for people: `SIGINT`, `spot notice (terminate at …)`, `stop file (/x exists)`."""
        if self.source in ("signal", "saves", "data"):
            return self.detail
        name = self.source.replace("-", " ")
        return f"{name} notice ({self.detail})" if name in NODE_SOURCES else f"{name} ({self.detail})"

    def fields(
        self, monotonic: Callable[[], float] = time.monotonic, local_clock: Callable[[], float] = time.time
    ) -> dict[str, Any]:
        """Return it as the fields of the event `notice`, plain JSON, with the node that it is about."""
        left = self.remaining(monotonic())
        ends = None if left is None else datetime.fromtimestamp(local_clock() + left, UTC)
        return {
            "source": self.source,
            "detail": self.detail,
            "deadline": ends and ends.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "host": self.host or socket.gethostname(),
            "instance_id": self.instance_id,
        }

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


def to_announce(known: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Choose, of the ranks' `fields` in their order, the one that stops the job and one for each node that AWS takes away.

    A launcher that starts the job again leaves these nodes out.
    """
    nodes: dict[object, Mapping[str, Any]] = {}
    for notice in known:
        if notice is known[0] or notice["source"] in NODE_SOURCES:
            nodes.setdefault((notice["source"], notice["host"]), notice)
    return list(nodes.values())


def nearer(current: Notice | None, new: Notice | None) -> Notice | None:
    """Return the notice to act on: the first one, unless the new one leaves less time; an unknown deadline counts as far."""
    if current is None or new is None:
        return current or new
    if new.deadline is None or (current.deadline is not None and current.deadline <= new.deadline):
        return current
    return new
