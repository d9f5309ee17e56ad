"""Records on their way to the sinks; events of the start are kept until there are sinks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from trainer.metrics.sink import Sink
from trainer.metrics.terminal import event_line


class Relay:
    """A Sink that passes everything to the sinks of `attach`, in their order, and holds events back until then.

    An attempt watches for notices before it owns its log.

    What was never attached (a start that failed) is printed to standard error at `close`, so that no warning is lost.
    """

    def __init__(self, who: str) -> None:
        """`who` begins each line that is printed: `rank_name`."""
        self._who = who
        self._lock = threading.Lock()
        self._held: list[tuple[str, dict[str, Any]]] = []
        self._sinks: tuple[Sink, ...] = ()
        self._before: tuple[Sink, ...] = ()
        """The sinks until `hold`, which `close` closes if no others came."""

    def attach(self, *sinks: Sink) -> None:
        """Send everything to `sinks` from now on, what was held back first."""
        with self._lock:
            self._sinks, self._before = sinks, ()
            for kind, fields in self._held:
                self._send(kind, fields)
            self._held.clear()

    def hold(self) -> None:
        """Hold events back again, for the sinks of the next `attach`."""
        with self._lock:
            self._before, self._sinks = self._sinks, ()

    def step(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.step(record)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        with self._lock:
            if self._sinks:
                self._send(kind, fields)
            else:
                self._held.append((kind, dict(fields)))

    def _send(self, kind: str, fields: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.event(kind, fields)

    def close(self) -> None:
        with self._lock:
            for kind, fields in self._held:
                print(f"{self._who}: {event_line(kind, fields)}", file=sys.stderr)
            self._held.clear()
            for sink in self._sinks or self._before:
                sink.close()


def rank_name(rank: int, launch_attempt: int | None) -> str:
    """Return how lines of a rank begin: several attempts of a launcher may share a log."""
    return f"rank {rank}" if launch_attempt is None else f"attempt {launch_attempt}, rank {rank}"


class WarningsOnly:
    """The Sink of ranks other than 0: errors of this rank alone go to standard error."""

    QUIET = frozenset(
        {
            "notice",
            "checkpoint_started",
            "checkpoint_committed",
            "checkpoint_failed",
            "checkpoint_skipped",
            "save_skipped",
        }
    )

    def __init__(self, who: str) -> None:
        self._who = who

    def step(self, record: Mapping[str, Any]) -> None:
        """Rank 0 logs the step for all."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind not in self.QUIET:
            print(f"{self._who}: {event_line(kind, fields)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is held."""
