"""Promises of votes: everyone is heard, nobody waits for the dead longer than agreed, nothing is kept forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, TCPStore

from trainer.parallel.votes import RankGoneError, StoreVotes, VoteError, VoteTimeout


@pytest.fixture(params=["hash", "tcp"])
def boxes(request: pytest.FixtureRequest) -> Iterator[list[StoreVotes]]:
    """Three ranks' views of one store: of one process, and through a socket as in a job."""
    if request.param == "hash":
        store = HashStore()
        yield [StoreVotes(store, 3) for _ in range(3)]
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield [StoreVotes(TCPStore("127.0.0.1", server.port), 3) for _ in range(3)]


class Asked(threading.Event):
    """Tells a wait to stop; `waited` says that it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.set()
        return super().wait(timeout)


def test_every_rank_hears_every_rank_and_the_later_word_counts(boxes: list[StoreVotes]) -> None:
    for rank, box in enumerate(boxes):
        box.post("topic", rank, {"said": "first"})
        box.post("topic", rank, {"said": [rank, None]})
    for box in boxes:
        assert box.gather("topic", 300.0) == {rank: {"said": [rank, None]} for rank in range(3)}


def test_a_rank_that_says_nothing_is_named_after_the_agreed_time(boxes: list[StoreVotes]) -> None:
    boxes[0].post("topic", 0, {})
    boxes[2].post("topic", 2, {})
    began = time.monotonic()
    with pytest.raises(VoteTimeout, match="rank 1 on 'topic'") as timeout:
        boxes[0].gather("topic", 0.1)
    assert time.monotonic() - began >= 0.1
    assert timeout.value.missing == [1]
    assert boxes[0].poll("topic") == {0: {}, 2: {}}


def test_rank_that_left_is_not_waited_for(boxes: list[StoreVotes]) -> None:
    boxes[1].post("topic", 1, {"x": 1})
    boxes[2].withdraw(2, "MemoryError")
    boxes[1].withdraw(1, "KeyError")
    assert boxes[0].gather("topic", 1e9, ranks=[1]) == {1: {"x": 1}}
    with pytest.raises(RankGoneError) as gone:
        boxes[0].gather("other", 1e9)
    assert list(gone.value.reasons.items()) == [(2, "MemoryError"), (1, "KeyError")]


def test_waiting_for_some_ranks_does_not_wait_for_the_others(boxes: list[StoreVotes]) -> None:
    boxes[1].post("topic", 1, {"x": 1})
    assert boxes[0].gather("topic", 1e9, ranks=[1]) == {1: {"x": 1}}


def test_a_late_word_ends_the_waiting(boxes: list[StoreVotes]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(boxes[0].gather, "topic", 1e9, ranks=[1], stop=(asked := Asked()))
        assert asked.waited.wait(300)
        boxes[1].post("topic", 1, {"late": True})
        assert waits.result() == {1: {"late": True}}


def test_whoever_waits_can_be_told_to_stop(boxes: list[StoreVotes]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(boxes[0].gather, "topic", 1e9, stop=(stop := Asked()))
        assert stop.waited.wait(300)
        stop.set()
        with pytest.raises(VoteError, match="stopped"):
            waits.result()


def test_a_dropped_topic_is_as_if_nothing_had_been_said() -> None:
    store = HashStore()
    box = StoreVotes(store, 1)
    before = store.num_keys()
    box.post("topic", 0, {})
    box.drop("topic")
    assert store.num_keys() == before
    assert box.poll("topic") == {}


def test_a_store_that_is_gone_is_one_line_and_no_hanging() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    box = StoreVotes(TCPStore("127.0.0.1", server.port), 2)
    box.post("topic", 0, {})
    del server
    for attempt in (lambda: box.gather("topic", 1e9), lambda: box.post("topic", 0, {}), lambda: box.drop("topic")):
        with pytest.raises(VoteError, match="does not answer") as gone:
            attempt()
        assert "\n" not in str(gone.value)
