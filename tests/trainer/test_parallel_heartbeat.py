"""A rank that is told to stop does not wait for a peer that is gone, and does wait for one that is slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from tests.fork_server import ForkServer
from tests.processes import wait_until
from tests.trainer.test_node_local import endless
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_PEERS, EXIT_REQUEUE
from trainer.parallel.heartbeat import Heartbeat, Silence
from trainer.parallel.world import World
from trainer.storage import open_store

pytestmark = pytest.mark.slow

BEAT_S = 0.05
HOST = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class Ranks:
    """Two or more ranks of one store, each a Heartbeat, with the codes that they would have left with."""

    def __init__(self, port: int, world_size: int, silent_s: float) -> None:
        self.codes: dict[int, int] = {}
        self.notice = threading.Event()
        self.beats: list[Heartbeat] = []
        for rank in range(world_size):
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
            world = World(rank, world_size, rank, torch.device("cpu"), PrefixStore("lustrain", store))
            times = {"beat_s": BEAT_S, "silent_s": silent_s}
            self.beats.append(Heartbeat(world, self.notice.is_set, leave=self.left(rank), **times))
        self.store = world.store
        for beat in self.beats:
            beat.__enter__()

    def left(self, rank: int) -> Callable[[int], object]:
        return lambda code: self.codes.setdefault(rank, code)

    def count(self, rank: int) -> int:
        return int(self.store.get(f"beats/{rank}"))

    def end(self, rank: int) -> None:
        self.beats[rank].__exit__()

    def close(self) -> None:
        for beat in self.beats:
            beat.__exit__()


@pytest.fixture
def port() -> int:
    """Of a store in this process, which lives as long as the tests."""
    STORES.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return int(STORES[-1].port)


STORES: list[TCPStore] = []


def test_rank_is_silent_once_its_count_stands_still_enough() -> None:
    silence = Silence(3, longest=3)
    looks = [[b"0", b"0", b"0"], *([str(one).encode(), b"0", str(one).encode()] for one in range(1, 9))]
    assert [silence.update(counts) for counts in looks] == [[], [], [], *[[1]] * 6]
    assert silence.update([b"9", b"1", b"9"]) == []


def test_without_any_count_all_are_silent() -> None:
    silence = Silence(2, longest=2)
    assert [silence.update([]), silence.update([])] == [[], [0, 1]]


def test_ranks_beat_on_after_a_notice_and_are_not_ended_by_it(port: int) -> None:
    ranks = Ranks(port, 3, silent_s=300.0)
    ranks.notice.set()
    then = [ranks.count(rank) for rank in range(3)]
    wait_until(lambda: all(ranks.count(rank) > then[rank] + 5 for rank in range(3)))
    ranks.close()
    assert ranks.codes == {}


def test_a_peer_that_is_gone_ends_those_who_are_told_to_stop(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(port, 3, silent_s=0.4)
    ranks.end(1)
    wait_until(lambda: ranks.count(0) > 20)
    assert ranks.codes == {}, "without a notice a launcher decides"
    ranks.notice.set()
    wait_until(lambda: len(ranks.codes) == 2)
    ranks.close()
    assert ranks.codes == {0: EXIT_PEERS, 2: EXIT_PEERS}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("told to stop, but rank " in line and " silent for 0.4 s" in line for line in lines)


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL], ids=["no answer", "no connection"])
def test_a_store_that_is_gone_is_a_rank_0_that_is_gone(end: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        ranks = Ranks(int(host.stdout.readline()), 2, silent_s=0.4)
        os.kill(host.pid, end)
        ranks.notice.set()
        wait_until(lambda: 1 in ranks.codes)
        ranks.close()
    finally:
        host.kill()
        host.communicate()
    assert ranks.codes[1] == EXIT_PEERS
    assert "rank 1 of 2: told to stop, but rank 0 has been silent" in capfd.readouterr().err


@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_with_a_peer_gone_ends_with_75_and_next_goes_on(
    fork_server: ForkServer, tmp_path: Path, told: int
) -> None:
    """A stopped process is to its peers what a lost machine is: its connections stay open, and nothing answers."""
    store = open_store(f"{tmp_path}/run")
    words = ["train", str(endless(tmp_path)), "--set", "checkpoint.every_steps=20", "--set", "parallel.timeout_s=6000"]
    job = fork_server.start(words, 2, {"LUSTRAIN_SILENT_S": "10"})
    rank = job.ranks[told]
    try:
        wait_until(lambda: committed(store))
        job.send(signal.SIGSTOP, [1 - told])
        job.send(signal.SIGTERM, [told])
        wait_until(lambda: rank not in job.running())
    finally:
        job.send(signal.SIGKILL)
        job.wait()
    assert rank.code == EXIT_PEERS, rank.said()
    assert f"told to stop, but rank {1 - told} has been silent for 10 s" in rank.said()
    again = fork_server.start(words, 2)
    again.wait_for("resumed")
    again.send(signal.SIGTERM, [0])
    assert again.wait() == [EXIT_REQUEUE] * 2, again.said()
