"""Promises of votes: everyone is heard, nobody waits for the dead longer than agreed, nothing is kept for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore, TCPStore

from trainer.checkpoint.votes import StoreVotes, VoteError, VoteTimeout


@pytest.fixture(params=["hash", "tcp"])
def boxes(request: pytest.FixtureRequest) -> Iterator[list[StoreVotes]]:
    """Three ranks' views of one store: of one process, and through a socket as in a job."""
    if request.param == "hash":
        store = HashStore()
        yield [StoreVotes(store, 3) for _ in range(3)]
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield [StoreVotes(TCPStore("127.0.0.1", server.port), 3) for _ in range(3)]


def test_every_rank_hears_every_rank_and_the_later_word_counts(boxes: list[StoreVotes]) -> None:
    for rank, box in enumerate(boxes):
        box.post("topic", rank, {"said": "first"})
        box.post("topic", rank, {"said": [rank, None]})
    for box in boxes:
        assert box.gather("topic", 1.0) == {rank: {"said": [rank, None]} for rank in range(3)}


def test_a_rank_that_says_nothing_is_named_after_the_agreed_time(boxes: list[StoreVotes]) -> None:
    boxes[0].post("topic", 0, {})
    boxes[2].post("topic", 2, {})
    began = time.monotonic()
    with pytest.raises(VoteTimeout, match="rank 1 on 'topic'") as timeout:
        boxes[0].gather("topic", 0.1)
    assert 0.1 <= time.monotonic() - began < 5
    assert timeout.value.missing == [1]
    assert boxes[0].poll("topic") == {0: {}, 2: {}}


def test_waiting_for_some_ranks_does_not_wait_for_the_others(boxes: list[StoreVotes]) -> None:
    boxes[1].post("topic", 1, {"x": 1})
    assert boxes[0].gather("topic", 1.0, ranks=[1]) == {1: {"x": 1}}


def test_a_late_word_ends_the_waiting(boxes: list[StoreVotes]) -> None:
    late = threading.Timer(0.05, lambda: boxes[1].post("topic", 1, {"late": True}))
    late.start()
    assert boxes[0].gather("topic", 30.0, ranks=[1]) == {1: {"late": True}}
    late.join()


def test_whoever_waits_can_be_told_to_stop(boxes: list[StoreVotes]) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    with pytest.raises(VoteError, match="stopped"):
        boxes[0].gather("topic", 60.0, stop=stop)
    assert time.monotonic() - began < 10


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
    for attempt in (lambda: box.gather("topic", 60.0), lambda: box.post("topic", 0, {}), lambda: box.drop("topic")):
        with pytest.raises(VoteError, match="does not answer") as gone:
            attempt()
        assert "\n" not in str(gone.value)
