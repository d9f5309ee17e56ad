"""However a notice comes (on one rank, twice, in a save, too late): a committed checkpoint, exit 85, nothing lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork_server import Job
from tests.lab.faulty_proxy import FaultyProxy, Hold
from tests.lab.servers import S3Place
from tests.processes import wait_until
from tests.torture.conftest import REFERENCE_STEPS, Bench
from tests.torture.inquest import nobody_left_behind
from tests.torture.small_run import assert_same_training, attempts_stored, newest_step, own_records
from trainer.checkpoint.lineage.lease import read_lease
from trainer.errors import EXIT_PEERS
from trainer.interrupt.signals import INSISTENT_S
from trainer.node.ranks import MAIN_STACK
from trainer.storage import ObjectStore, open_store

pytestmark = pytest.mark.slow

ENDLESS = {"train.steps": 1_000_000}
STEADY = {**ENDLESS, "checkpoint.every_steps": 1_000_000}
"""Saves on a notice only."""


def last_logged(store: ObjectStore, generation: int) -> int:
    return int(own_records(store, generation)[0][-1]["step"])


def test_notice_on_one_rank_stops_all_at_one_step_all_committed(bench: Bench, tmp_path: Path) -> None:
    uri = f"{tmp_path}/run"
    job = bench.start(uri, STEADY, ranks=2)
    job.wait_for("step ")
    job.send(signal.SIGUSR1, [1])
    assert job.wait() == [85, 85], job.said()
    store = open_store(uri)
    stopped_at = newest_step(store)
    assert stopped_at == last_logged(store, 1) >= 1
    again = bench.start(uri, {"train.steps": stopped_at + 20}, ranks=2)
    assert again.wait() == [0, 0], again.said()
    assert f"resumed: step {stopped_at}," in again.said()
    assert_same_training(store, bench.reference(2), min(stopped_at + 20, REFERENCE_STEPS))


def test_a_second_sigterm_during_the_save_changes_nothing(bench: Bench, weed_s3: S3Place, proxy: FaultyProxy) -> None:
    job = bench.start(weed_s3.uri(), STEADY, ranks=2, environment={"AWS_ENDPOINT_URL": proxy.endpoint})
    job.wait_for("step ")
    proxy.inject(Hold(all_told := threading.Event()), method="PUT", key="attempts/")
    job.send(signal.SIGTERM)
    save_begun(proxy, after=0)
    for _ in range(3):
        job.tell(signal.SIGTERM)
    all_told.set()
    assert job.wait() == [85, 85], job.said()
    store = open_store(weed_s3.uri())
    assert newest_step(store) == last_logged(store, 1)
    assert len(attempts_stored(store)) == 1, "the save was not begun anew"


@pytest.mark.parametrize(
    ("grace_s", "saves"),
    [(86_400.0, "the newest state"), (0.001, "the one in flight")],
    ids=["enough time", "too little"],
)
def test_notice_during_a_save_lets_it_commit_and_saves_newest(
    bench: Bench, weed_s3: S3Place, proxy: FaultyProxy, grace_s: float, saves: str
) -> None:
    sets = {**ENDLESS, "interrupt.signal_grace_s": grace_s}
    job = bench.start(weed_s3.uri(), sets, environment={"AWS_ENDPOINT_URL": proxy.endpoint})
    job.wait_for("checkpoint committed: step 5,")
    proxy.inject(Hold(decided := threading.Event()), method="PUT", key="attempts/")
    in_flight = save_begun(proxy, after=newest_step(open_store(weed_s3.uri())))
    job.send(signal.SIGTERM)
    wait_until(lambda: finishes_save(job))
    decided.set()
    assert set(job.wait()) == {85}, job.said()
    store = open_store(weed_s3.uri())
    newest, last = newest_step(store), last_logged(store, 1)
    assert newest == (last if saves == "the newest state" else in_flight)
    assert in_flight < last, "the notice came during the save"
    again = bench.start(weed_s3.uri(), {"train.steps": newest + 10})
    assert set(again.wait()) == {0}, again.said()
    assert_same_training(store, bench.reference(), min(newest + 10, REFERENCE_STEPS))


@pytest.mark.parametrize(
    ("bench", "until"),
    [
        ("ddp", "it is forked"),
        ("ddp", "the ranks meet"),
        ("ddp", "the run is ours"),
        ("ddp", "it has resumed"),
        ("fsdp", "the run is ours"),
        ("fsdp", "it has resumed"),
    ],
    indirect=["bench"],
)
def test_a_notice_while_the_job_starts_is_85_and_costs_nothing(bench: Bench, tmp_path: Path, until: str) -> None:
    uri = f"{tmp_path}/run"
    assert bench.start(uri, {"train.steps": 10}, ranks=2).wait() == [0, 0]
    store = open_store(uri)
    job = bench.start(uri, STEADY, ranks=2)
    moments: dict[str, Callable[[], object]] = {
        "it is forked": lambda: True,
        "the ranks meet": lambda: all(sockets(rank.pid) for rank in job.ranks),
        "the run is ours": lambda: (lease := read_lease(store)) and lease.generation == 2,
        "it has resumed": lambda: "resumed: step 10," in job.said(),
    }
    wait_until(moments[until])
    job.send(signal.SIGTERM)
    assert job.wait() == [85, 85], job.said()
    assert newest_step(store) == (last_logged(store, 2) if own_records(store, 2)[0] else 10)
    assert "Traceback" not in job.said()
    again = bench.start(uri, {"train.steps": 30}, ranks=2)
    assert again.wait() == [0, 0], again.said()
    assert_same_training(store, bench.reference(2), 30)


def test_later_ctrl_c_stops_at_once_and_leaves_no_process_behind(
    bench: Bench, weed_s3: S3Place, proxy: FaultyProxy
) -> None:
    uri = weed_s3.uri()
    assert bench.start(uri, {"train.steps": 10}, ranks=2).wait() == [0, 0]
    job = bench.start(uri, STEADY, ranks=2, environment={"AWS_ENDPOINT_URL": proxy.endpoint})
    job.wait_for("step ")
    proxy.inject(Hold(threading.Event()), method="PUT", key="attempts/")
    job.send(signal.SIGINT)
    # The save shows that the first one was heard; from then on no other counts as its repetition for longer than this.
    save_begun(proxy, after=10)
    heard = time.monotonic()
    wait_until(lambda: time.monotonic() - heard > INSISTENT_S)
    job.send(signal.SIGINT)
    codes = job.wait()
    assert 130 in codes, job.said()
    assert set(codes) <= {130, 1, EXIT_PEERS}, job.said()
    assert "Traceback" not in job.said()
    nobody_left_behind(bench.server)
    store = open_store(uri)
    assert newest_step(store) == 10
    again = bench.start(uri, {"train.steps": 20}, ranks=2)
    assert again.wait() == [0, 0], again.said()
    assert_same_training(store, bench.reference(2), 20)


def sockets(pid: int) -> int:
    """How many a process has open."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(link).startswith("socket:")
    return found


def finishes_save(job: Job) -> bool:
    """Whether rank 0 has decided what to do about a notice, and waits for saves; it shows its stack."""
    assert job.ranks[0] in job.running(), job.said()
    job.send(MAIN_STACK, [0])
    return bool(re.search(r"in _finish_save\n.* in save_on_notice", job.ranks[0].said()))


def save_begun(proxy: FaultyProxy, after: int) -> int:
    """Wait until the data of a save of a step beyond `after` is on its way; returns the step."""

    def begun() -> list[int]:
        found = [re.match(r"PUT .*/attempts/\d+-(\d+)-", request) for request in list(proxy.seen)]
        return [int(one[1]) for one in found if one and int(one[1]) > after]

    wait_until(begun)
    return begun()[0]
