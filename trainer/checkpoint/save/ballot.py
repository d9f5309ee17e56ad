"""The messages between ranks about one save: rank 0's plan, every rank's vote, rank 0's verdict."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.save.writer import Stored
from trainer.checkpoint.votes import VoteBox


@dataclass(frozen=True)
class Plan:
    """Rank 0's decision on one call of save(): the name under which all ranks store; where it is empty, `why_not`."""

    attempt: str
    why_not: str = ""
    keep: tuple[ManifestId, ...] = ()
    """Commits whose fast copies every rank keeps."""


@dataclass(frozen=True)
class Vote:
    """One rank's result: what it stored, or `error`. `closed` is the number of the last call whose end it knows."""

    stored: Stored | None
    error: str
    closed: int


@dataclass(frozen=True)
class Verdict:
    """Rank 0's decision on how a save ended; `lost` holds the lines of a LostRunError."""

    committed: bool
    detail: str
    bytes: int = 0
    lost: tuple[str, ...] = ()


class Ballot:
    """One rank's part in the messages about all saves of a generation; calls of save() are numbered alike on all ranks.

    Every method raises VoteError when the others cannot be reached, the reading ones VoteTimeout, or VoteError once
    `stop` is set. May be used from several threads.
    """

    def __init__(self, votes: VoteBox, rank: int, generation: int, stop: threading.Event) -> None:
        self._votes, self._rank, self._generation, self._stop = votes, rank, generation, stop
        self._topics: list[tuple[int, str]] = []
        """Rank 0: call numbers and the topics that were opened for them."""
        self._lock = threading.Lock()

    def announce(self, number: int, plan: Plan) -> None:
        """Post, on rank 0, the plan for call `number`."""
        self._post(number, self._plan_topic(number), plan)

    def plan(self, number: int, timeout: float) -> Plan:
        """Return rank 0's plan for call `number`."""
        plan = self._read_rank_0(self._plan_topic(number), timeout)
        return Plan(plan["attempt"], plan["why_not"], tuple(ManifestId(**commit) for commit in plan["keep"]))

    def vote(self, number: int, attempt: str, vote: Vote) -> None:
        """Post this rank's result."""
        self._post(number, f"{attempt}/votes", vote)

    def votes(self, attempt: str, timeout: float) -> dict[int, Vote]:
        """Gather, on rank 0, every rank's vote, then drop the messages about saves that all ranks are done with."""
        posted = self._votes.gather(f"{attempt}/votes", timeout, stop=self._stop)
        votes = {rank: _vote(body) for rank, body in posted.items()}
        self._forget(min(vote.closed for vote in votes.values()))
        return votes

    def announce_verdict(self, number: int, attempt: str, verdict: Verdict) -> None:
        """Post, on rank 0, how the save ended."""
        self._post(number, f"{attempt}/verdict", verdict)

    def verdict(self, attempt: str, timeout: float) -> Verdict:
        """Return rank 0's verdict on how the save ended."""
        verdict = self._read_rank_0(f"{attempt}/verdict", timeout)
        return Verdict(verdict["committed"], verdict["detail"], verdict["bytes"], tuple(verdict["lost"]))

    def _post(self, number: int, topic: str, message: Plan | Vote | Verdict) -> None:
        if self._rank == 0:
            with self._lock:
                self._topics.append((number, topic))
        self._votes.post(topic, self._rank, asdict(message))

    def _read_rank_0(self, topic: str, timeout: float) -> dict[str, Any]:
        return self._votes.gather(topic, timeout, ranks=[0], stop=self._stop)[0]

    def _plan_topic(self, number: int) -> str:
        return f"save/{self._generation}/{number}"

    def _forget(self, closed: int) -> None:
        with self._lock:
            done = [topic for number, topic in self._topics if number <= closed]
            self._topics = [(number, topic) for number, topic in self._topics if number > closed]
        for topic in done:
            self._votes.drop(topic)


def _vote(body: dict[str, Any]) -> Vote:
    return Vote(Stored(**body["stored"]) if body["stored"] else None, body["error"], body["closed"])
