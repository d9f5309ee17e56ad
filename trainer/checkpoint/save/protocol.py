"""The messages between ranks about one save: rank 0's start, every rank's result, rank 0's outcome."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

from lustrain.from_json import from_json
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.save.writer import Stored
from trainer.parallel.votes import VoteBox

SAVE_PROTOCOL = 1
"""Goes up whenever ranks with another number could not save one checkpoint together: by its messages, its plan of chunks or
its records. Ranks compare it at a start (`trainer.run.versions`)."""


@dataclass(frozen=True)
class SaveStart:
    """Rank 0's decision on one call of save(): the name under which all ranks store; where it is empty, `why_not`."""

    attempt: str
    why_not: str = ""
    keep: tuple[ManifestId, ...] = ()
    """Commits whose fast copies every rank keeps."""


@dataclass(frozen=True)
class RankResult:
    """One rank's result: what it stored, or `error`. `closed` is the number of the last call whose end it knows.

    `layout` is the checksum of the layout by which it stored, empty where that is none of the whole job.
    """

    stored: Stored | None
    error: str
    closed: int
    layout: str = ""


@dataclass(frozen=True)
class SaveOutcome:
    """Rank 0's decision on how a save ended; `lost` holds the lines of a LostRunError."""

    committed: bool
    detail: str
    bytes: int = 0
    lost: tuple[str, ...] = ()


class SaveProtocol:
    """One rank's part in the messages about all saves of a generation; calls of save() are numbered alike on all ranks.

    Every method raises VoteError when the others cannot be reached, the reading ones VoteTimeout, or VoteError once
    `stop` is set. May be used from several threads.
    """

    def __init__(self, votes: VoteBox, rank: int, generation: int, stop: threading.Event) -> None:
        self._votes, self._rank, self._generation, self._stop = votes, rank, generation, stop
        self._topics: list[tuple[int, str]] = []
        """Rank 0: call numbers and the topics that were opened for them."""
        self._lock = threading.Lock()

    def post_start(self, number: int, start: SaveStart) -> None:
        """Post, on rank 0, the start for call `number`."""
        self._post(number, self._start_topic(number), start)

    def read_start(self, number: int, timeout: float) -> SaveStart:
        """Return rank 0's start for call `number`."""
        return from_json(SaveStart, self._read_rank_0(self._start_topic(number), timeout))

    def post_result(self, number: int, attempt: str, result: RankResult) -> None:
        """Post this rank's result."""
        self._post(number, f"{attempt}/votes", result)

    def gather_results(self, attempt: str, timeout: float) -> dict[int, RankResult]:
        """Gather, on rank 0, every rank's result, then drop the messages about saves that all ranks are done with."""
        posted = self._votes.gather(f"{attempt}/votes", timeout, stop=self._stop)
        results = {rank: from_json(RankResult, body) for rank, body in posted.items()}
        self._forget(min(result.closed for result in results.values()))
        return results

    def post_outcome(self, number: int, attempt: str, outcome: SaveOutcome) -> None:
        """Post, on rank 0, how the save ended."""
        self._post(number, f"{attempt}/verdict", outcome)

    def read_outcome(self, attempt: str, timeout: float) -> SaveOutcome:
        """Return rank 0's outcome of the save."""
        return from_json(SaveOutcome, self._read_rank_0(f"{attempt}/verdict", timeout))

    def _post(self, number: int, topic: str, message: SaveStart | RankResult | SaveOutcome) -> None:
        if self._rank == 0:
            with self._lock:
                self._topics.append((number, topic))
        self._votes.post(topic, self._rank, asdict(message))

    def _read_rank_0(self, topic: str, timeout: float) -> dict[str, Any]:
        return self._votes.gather(topic, timeout, ranks=[0], stop=self._stop)[0]

    def _start_topic(self, number: int) -> str:
        return f"save/{self._generation}/{number}"

    def _forget(self, closed: int) -> None:
        with self._lock:
            done = [topic for number, topic in self._topics if number <= closed]
            self._topics = [(number, topic) for number, topic in self._topics if number > closed]
        for topic in done:
            self._votes.drop(topic)
