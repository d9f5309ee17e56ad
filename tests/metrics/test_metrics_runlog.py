"""No record is lost or doubled, and the loop never waits, whatever the store does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.servers import S3Place
from tests.processes import wait_until
from trainer.metrics import RunLog
from trainer.metrics.reader import read_events, read_history, read_steps
from trainer.storage import ObjectStore, StorageError, open_store
from trainer.storage.local import LocalStore

DOWN = "the store does not answer"


class Unsteady(LocalStore):
    """A folder behind a line that drops requests and answers: `outcomes` says what becomes of each next put.

    `works`: stored and answered; `dropped`: neither; `unanswered`: stored, but the caller is told that it failed.
    """

    def __init__(self, folder: Path, outcomes: Iterable[str] = ()) -> None:
        super().__init__(str(folder))
        self.outcomes = iter(outcomes)
        self.down, self.stuck = threading.Event(), threading.Event()
        self.puts: list[str] = []

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        self.puts.append(key)
        while self.stuck.is_set():
            time.sleep(0.005)
        outcome = "dropped" if self.down.is_set() else next(self.outcomes, "works")
        if outcome == "dropped":
            raise StorageError(DOWN)
        etag = super().put(key, body, if_absent=if_absent, if_match=if_match)
        if outcome == "unanswered":
            raise StorageError(DOWN)
        return etag

    def read(self, key: str) -> tuple[bytes, str]:
        if self.down.is_set():
            raise StorageError(DOWN)
        return super().read(key)


@pytest.fixture
def store(tmp_path: Path) -> Unsteady:
    return Unsteady(tmp_path / "run")


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/spool")
    return tmp_path / "spool"


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / step, "world_size": 2, "attempt": 1, **more}


def steps_of(store: ObjectStore) -> list[int]:
    with TestCase().assertNoLogs("trainer.metrics.reader"):
        return [entry["step"] for entry in read_steps(store)]


def lines_stored(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.jsonl"))


def test_what_was_logged_is_read_back_in_order(store: Unsteady) -> None:
    log = RunLog(store, 3, flush_s=60.0)
    for step in range(1, 6):
        log.step(record(step, attempt=3))
    log.event("saved", {"step": 5, "seconds": 0.25})
    log.close()
    assert [entry["loss"] for entry in read_steps(store)] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    (event,) = read_events(store)
    assert (event["event"], event["step"], event["seconds"], event["attempt"]) == ("saved", 5, 0.25, 3)
    assert event["time"].endswith("Z")
    (attempt,) = read_history(store)[1]
    assert (attempt.generation, attempt.first_step, attempt.last_step, attempt.world_size) == (3, 1, 5, 2)
    assert attempt.started <= attempt.ended
    assert (store.root / "metrics" / "000003-00000.jsonl").exists()


def test_events_carry_the_launchers_number_where_there_is_one(store: Unsteady) -> None:
    for generation, number in ((1, None), (2, 7)):
        log = RunLog(store, generation, flush_s=60.0, launch_attempt=number)
        log.event("started", {})
        log.close()
    assert [event.get("launch_attempt") for event in read_events(store)] == [None, 7]


def test_records_become_durable_on_their_own_within_flush_time(store: Unsteady) -> None:
    log = RunLog(store, 1, flush_s=0.05)
    log.step(record(1))
    wait_until(lambda: steps_of(store) == [1])
    log.close()


def test_an_event_takes_the_steps_before_it_along_at_once(store: Unsteady) -> None:
    log = RunLog(store, 1, flush_s=3600.0)
    log.step(record(1))
    log.event("saved", {"step": 1})
    wait_until(lambda: read_events(store))
    assert steps_of(store) == [1]
    log.close()


def test_commit_can_wait_for_records_up_to_a_later_step(store: Unsteady) -> None:
    log = RunLog(store, 1, flush_s=3600.0)
    log.step(record(1))
    assert log.flush_step(1, timeout=300.0)
    assert steps_of(store) == [1]
    durable: list[bool] = []
    waiting = threading.Thread(target=lambda: durable.append(log.flush_step(3, timeout=300.0)))
    waiting.start()
    log.step(record(2))
    assert not durable
    log.step(record(3))
    waiting.join()
    assert durable == [True]
    assert steps_of(store) == [1, 2, 3]
    assert not log.flush_step(99, timeout=0.05)
    log.close()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    outcomes=st.lists(st.sampled_from(["works", "dropped", "unanswered"]), max_size=8),
    batches=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    part_bytes=st.sampled_from([1, 150, 1 << 20]),
    memory_bytes=st.sampled_from([1, 400, 1 << 20]),
)
def test_no_record_is_lost_or_doubled_by_a_store_that_fails(
    tmp_path_factory: pytest.TempPathFactory,
    outcomes: list[str],
    batches: list[int],
    part_bytes: int,
    memory_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    store = Unsteady(folder, outcomes)
    log = RunLog(store, 1, 0.002, memory_bytes=memory_bytes, part_bytes=part_bytes, on_trouble=lambda line: None)
    step = 0
    for size in batches:
        for _ in range(size):
            step += 1
            log.step(record(step))
        log.flush(0.01)
    assert log.flush(300.0)
    log.close()
    assert steps_of(store) == list(range(1, step + 1))
    assert lines_stored(folder) == step


@pytest.mark.slow
def test_outage_is_said_once_when_it_begins_and_when_it_ends(store: Unsteady) -> None:
    troubles: list[str] = []
    store.down.set()
    log = RunLog(store, 1, 0.01, on_trouble=troubles.append)
    log.step(record(1))
    assert not log.flush(0.3)
    wait_until(lambda: len(store.puts) > 2)
    assert len(troubles) == 1
    assert DOWN in troubles[0]
    store.down.clear()
    assert log.flush(300.0)
    log.close()
    assert len(troubles) == 2
    assert steps_of(store) == [1]


@pytest.mark.slow
def test_the_loop_waits_for_no_hanging_store_with_bounded_memory(store: Unsteady, spool: Path) -> None:
    store.stuck.set()
    log = RunLog(store, 1, 0.01, memory_bytes=200_000, part_bytes=50_000)
    for step in range(1, 20_001):
        log.step(record(step))
    assert store.stuck.is_set()
    spooled = sum(path.stat().st_size for path in spool.rglob("*.jsonl"))
    assert spooled > 1_000_000
    store.stuck.clear()
    assert log.flush(300.0)
    log.close()
    assert steps_of(store) == list(range(1, 20_001))
    assert list(spool.iterdir()) == []


def test_what_store_never_takes_stays_in_files_that_are_named(store: Unsteady, spool: Path) -> None:
    store.down.set()
    troubles: list[str] = []
    log = RunLog(store, 1, 0.01, on_trouble=troubles.append)
    for step in range(1, 8):
        log.step(record(step))
    log.close(timeout=0.1)
    (folder,) = spool.iterdir()
    assert "7 log records" in troubles[-1]
    assert str(folder) in troubles[-1]
    assert lines_stored(folder) == 7


def test_records_stay_in_memory_where_the_temporary_folder_fails(store: Unsteady, spool: Path) -> None:
    spool.rmdir()
    store.down.set()
    troubles: list[str] = []
    log = RunLog(store, 1, 0.01, memory_bytes=300, part_bytes=100, on_trouble=troubles.append)
    for step in range(1, 51):
        log.step(record(step))
    store.down.clear()
    assert log.flush(300.0)
    log.close()
    assert steps_of(store) == list(range(1, 51))
    assert sum("temporary folder" in trouble for trouble in troubles) == 1


def test_part_another_job_left_under_our_name_is_not_overwritten(store: Unsteady) -> None:
    store.put("metrics/000001-00000.jsonl", b'{"step":1,"loss":9.0}\n')
    log = RunLog(store, 1, 60.0)
    log.step(record(2))
    log.close()
    assert steps_of(store) == [1, 2]


def test_events_may_come_from_many_threads(store: Unsteady) -> None:
    log = RunLog(store, 1, 0.01)

    def say(by: int) -> None:
        for n in range(50):
            log.event("said", {"by": by, "n": n})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(say, range(8)))
    log.close()
    said = read_events(store)
    assert [[event["n"] for event in said if event["by"] == by] for by in range(8)] == [list(range(50))] * 8


def test_damaged_parts_are_reported_and_the_rest_is_read(store: Unsteady) -> None:
    for generation, first in ((1, 1), (2, 4)):
        log = RunLog(store, generation, 60.0)
        for step in range(first, first + 3):
            log.step(record(step))
        log.close()
    part = store.root / "metrics" / "000001-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    with TestCase().assertLogs("trainer.metrics.reader") as logged:
        assert [entry["step"] for entry in read_steps(store)] == [1, 2, 4, 5, 6]
    assert ["metrics/000001-00000.jsonl line 3" in line for line in logged.output] == [True]


KILLED = """
import sys, time
from trainer.metrics import RunLog
from trainer.storage import open_store

log = RunLog(open_store(sys.argv[1]), 1, 0.02)
for step in range(1, 10**9):
    log.step({"step": step, "loss": 1 / step, "world_size": 1, "attempt": 1})
    if step == 100:
        log.flush()
        print("flushed", flush=True)
    time.sleep(0.0005)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a folder", "S3"])
def test_after_sigkill_everything_flushed_is_read_without_gaps(tmp_path: Path, moto_s3: S3Place, place: str) -> None:
    store = open_store(moto_s3.uri() if place == "S3" else str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", KILLED, store.uri], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "flushed\n"
    wait_until(lambda: len(steps_of(store)) > 150)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    steps = steps_of(store)
    assert steps == list(range(1, len(steps) + 1))
