"""Small messages between ranks through a key-value store: without collectives, so that no rank waits for a dead one."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

_GONE = "gone"
_FIRST_WAIT_S = 0.005
_LONGEST_WAIT_S = 0.25
"""Polling slows down to four requests a second per rank, a small load for the store even from a thousand ranks."""


class VoteError(Exception):
    """The store that carries the votes does not answer, most likely because the rank that hosts it has ended."""


class VoteTimeout(VoteError):
    """Some ranks did not post in time; `missing` names them."""

    def __init__(self, topic: str, missing: list[int], timeout: float) -> None:
        self.missing = missing
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        super().__init__(f"no vote from rank {shown} on {topic!r} within {timeout:.0f} s")


class RankGoneError(VoteError):
    """Ranks ended without posting; `reasons` by rank, in the order in which they left."""

    def __init__(self, topic: str, reasons: dict[int, str]) -> None:
        self.reasons = reasons
        rank, why = next(iter(reasons.items()))
        more = f", as did {len(reasons) - 1} more" if len(reasons) > 1 else ""
        super().__init__(f"no vote on {topic!r}: rank {rank} ended ({why}){more}")


class VoteBox(ABC):
    """Per topic, one JSON object from each rank that posts; a rank's later post replaces its earlier one."""

    world_size: int

    @abstractmethod
    def post(self, topic: str, rank: int, value: dict[str, Any]) -> None:
        """Post one rank's value for a topic; raises VoteError when the store does not answer."""

    @abstractmethod
    def _read_posts(self, topic: str, seen: set[int], posts: dict[int, dict[str, Any]]) -> None:
        """Add the posts that are not among the `seen` ones to `posts`, each by its rank; they are seen from then on."""

    @abstractmethod
    def drop(self, topic: str) -> None:
        """Remove a topic that every rank is done with; raises VoteError."""

    def gather(
        self,
        topic: str,
        timeout: float,
        *,
        ranks: Sequence[int] | None = None,
        stop: threading.Event | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Wait until all of `ranks` (None: every rank) have posted, and return their values by rank.

        Raises RankGoneError when a missing one has left, VoteTimeout with the missing ranks after `timeout` seconds, and
        VoteError when `stop` is set meanwhile.
        """
        wanted = range(self.world_size) if ranks is None else ranks
        stop = stop or threading.Event()
        deadline = time.monotonic() + timeout
        pause = _FIRST_WAIT_S
        posts: dict[int, dict[str, Any]] = {}
        seen: set[int] = set()
        while True:
            self._read_posts(topic, seen, posts)
            missing = [rank for rank in wanted if rank not in posts]
            if not missing:
                return {rank: posts[rank] for rank in wanted}
            if left_early := {rank: post["why"] for rank, post in self.poll(_GONE).items() if rank in missing}:
                raise RankGoneError(topic, left_early)
            left = deadline - time.monotonic()
            if left <= 0:
                raise VoteTimeout(topic, missing, timeout)
            if stop.wait(min(pause, left)):
                raise VoteError(f"stopped waiting for votes on {topic!r}")
            pause = min(pause * 2, _LONGEST_WAIT_S)

    def poll(self, topic: str) -> dict[int, dict[str, Any]]:
        """Return the values that were posted so far, by rank, without waiting; raises VoteError."""
        posts: dict[int, dict[str, Any]] = {}
        self._read_posts(topic, set(), posts)
        return posts

    def withdraw(self, rank: int, why: str) -> None:
        """End the waiting for posts of this rank, which will not come any more; raises VoteError."""
        self.post(_GONE, rank, {"why": why})


class StoreVotes(VoteBox):
    """Votes in a `torch.distributed.Store` (TCPStore in a job, HashStore alone).

    Each post takes the next slot of its topic, so that a look for new posts is one round trip whatever the world size.
    Only calls that return at once are used: a blocking `get` would hold the connection that process groups of the same
    rank may share.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self.world_size = world_size
        self._store = store

    def post(self, topic: str, rank: int, value: dict[str, Any]) -> None:
        # Before a slot is taken: it may fail.
        body = json.dumps({"rank": rank, "value": value})
        try:
            slot = self._store.add(_count_key(topic), 1) - 1
            self._store.set(_slot_key(topic, slot), body)
        except DistError as error:
            raise VoteError(_unreachable(error)) from error

    def _read_posts(self, topic: str, seen: set[int], posts: dict[int, dict[str, Any]]) -> None:
        try:
            for slot in range(self._store.add(_count_key(topic), 0)):
                if slot in seen:
                    continue
                key = _slot_key(topic, slot)
                # A rank takes its slot before it fills it, and may die in between.
                if not self._store.check([key]):
                    continue
                post = json.loads(self._store.get(key))
                posts[int(post["rank"])] = post["value"]
                seen.add(slot)
        except DistError as error:
            raise VoteError(_unreachable(error)) from error

    def drop(self, topic: str) -> None:
        try:
            for slot in range(self._store.add(_count_key(topic), 0)):
                self._store.delete_key(_slot_key(topic, slot))
            self._store.delete_key(_count_key(topic))
        except DistError as error:
            raise VoteError(_unreachable(error)) from error


def _count_key(topic: str) -> str:
    return f"votes/{topic}/posted"


def _slot_key(topic: str, slot: int) -> str:
    return f"votes/{topic}/{slot}"


def _unreachable(error: DistError) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"the store that carries votes between ranks does not answer: {first_line}"
