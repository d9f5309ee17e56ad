"""Many ranks in one process: their waits pass in a time of their own, and their requests to the store are counted."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

from tests.trainer.ranks import run_threads
from trainer.parallel.votes import StoreVotes


class SimulatedTime:
    """A time that stands still while any rank is at work, and moves to the end of the shortest wait when all wait."""

    def __init__(self, ranks: int) -> None:
        self._lock = threading.Lock()
        self._working = ranks
        self._now = 0.0
        self._waits: list[tuple[float, int, threading.Event]] = []
        self._numbers = itertools.count()

    def wait(self, seconds: float) -> None:
        over = threading.Event()
        with self._lock:
            heapq.heappush(self._waits, (self._now + seconds, next(self._numbers), over))
            self._stop_working()
        over.wait()

    def leave(self) -> None:
        with self._lock:
            self._stop_working()

    def _stop_working(self) -> None:
        self._working -= 1
        if self._working or not self._waits:
            return
        self._now = self._waits[0][0]
        while self._waits and self._waits[0][0] == self._now:
            heapq.heappop(self._waits)[2].set()
            self._working += 1


class CountingStore:
    """One rank's connection to a store of which all ranks share the `content`: every call is a round trip."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self.round_trips = 0

    def add(self, key: str, amount: int) -> int:
        self.round_trips += 1
        with _adding:
            self._content[key] = self._content.get(key, 0) + amount
            return int(self._content[key])

    def set(self, key: str, value: str) -> None:
        self.round_trips += 1
        self._content[key] = value

    def check(self, keys: list[str]) -> bool:
        self.round_trips += 1
        return all(key in self._content for key in keys)

    def get(self, key: str) -> str:
        self.round_trips += 1
        return str(self._content[key])


_adding = threading.Lock()


class SimulatedVotes(StoreVotes):
    """Votes whose waits take no time of the machine."""

    def __init__(self, store: Any, world_size: int, clock: SimulatedTime) -> None:
        super().__init__(store, world_size)
        self._clock = clock

    def gather(self, topic: str, timeout: float, **how: Any) -> dict[int, dict[str, Any]]:
        return super().gather(topic, timeout, stop=_Waits(self._clock), **how)


class _Waits(threading.Event):
    def __init__(self, clock: SimulatedTime) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.wait(timeout)
        return False


def simulate(world_size: int, work: Callable[[int, SimulatedVotes], Any]) -> tuple[list[Any], list[int]]:
    """`work(rank, votes)` on every rank: what each returns or raises, and the round trips of each to the store."""
    content: dict[str, Any] = {}
    clock, stores = SimulatedTime(world_size), [CountingStore(content) for _ in range(world_size)]

    def one(rank: int) -> Any:
        try:
            return work(rank, SimulatedVotes(stores[rank], world_size, clock))
        finally:
            clock.leave()

    return run_threads(world_size, one), [store.round_trips for store in stores]
