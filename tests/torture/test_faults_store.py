"""A training whose S3 fails: bounded retries, one clear line, nothing that was committed lost, no loss changed by a bit."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.fork_server import Job
from tests.lab.faulty_proxy import Answer, Cut, Delay, FaultyProxy, Reset, Skew
from tests.lab.servers import S3Place
from tests.torture.conftest import ONE_MESH, Bench
from tests.torture.small_run import assert_same_training, committed_lines, events, newest_step
from trainer.storage import open_store

pytestmark = pytest.mark.slow

MOST_TRIES = 6
"""One request in eight meets a fault here, so six in a row are as likely as one in 250,000."""
FEW_TRIES = {"AWS_MAX_ATTEMPTS": "2"}


def through(proxy: FaultyProxy, **more: str) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": proxy.endpoint, **more}


def lines_with(job: Job, text: str) -> list[str]:
    return [line for line in job.ranks[0].said().splitlines() if text in line]


@pytest.mark.parametrize(("bench", "ranks"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)], indirect=["bench"])
def test_store_that_fails_now_and_then_costs_bounded_retries(
    bench: Bench, weed_s3: S3Place, proxy: FaultyProxy, ranks: int
) -> None:
    faults = (Answer(500, "InternalError"), Answer(503, "SlowDown"), Reset(), Reset(after=True), Cut(), Delay(0.1))
    for fault in faults:
        proxy.inject(fault, probability=0.02)
    job = bench.start(weed_s3.uri(), {"train.steps": 60}, ranks=ranks, environment=through(proxy))
    assert set(job.wait()) == {0}, job.said()
    assert_same_training(open_store(weed_s3.uri()), bench.reference(ranks), 60)
    assert "Traceback" not in job.said()
    assert sum(proxy.did.values()) >= 5, "too few faults to say anything"
    puts = Counter(request for request in proxy.seen if request.startswith("PUT"))
    request, tries = puts.most_common(1)[0]
    assert tries <= MOST_TRIES, f"{request} was tried {tries} times"


def test_training_goes_on_without_store_and_saves_commit_later(
    bench: Bench, weed_s3: S3Place, proxy: FaultyProxy
) -> None:
    endless = {"train.steps": 1_000_000}
    job = bench.start(weed_s3.uri(), endless, environment=through(proxy, **FEW_TRIES))
    job.wait_for("checkpoint committed: step 5,")
    proxy.inject(Answer(503, "SlowDown"))
    job.wait_for_lines("checkpoint failed:", 2)
    proxy.heal()
    before = len(committed_lines(job.said()))
    job.wait_for_lines("checkpoint committed:", before + 1)
    job.send(signal.SIGTERM)
    assert set(job.wait()) == {85}, job.said()
    store = open_store(weed_s3.uri())
    assert_same_training(store, bench.reference(), 20)
    failed = events(store, "checkpoint_failed")
    assert len(failed) >= 2
    assert all("\n" not in event["detail"] and "503" in event["detail"] for event in failed), failed
    assert len(lines_with(job, "the log cannot be stored")) <= 1
    assert "Traceback" not in job.said()


@pytest.mark.torture
@ONE_MESH
def test_store_that_never_comes_back_is_exit_1_with_log_files(
    bench: Bench, weed_s3: S3Place, proxy: FaultyProxy
) -> None:
    job = bench.start(weed_s3.uri(), {"train.steps": 1_000_000}, environment=through(proxy, **FEW_TRIES))
    job.wait_for("checkpoint committed: step 5,")
    proxy.inject(Reset())
    job.send(signal.SIGTERM)
    assert set(job.wait(120.0)) == {1}, job.said()
    (line,) = lines_with(job, "log records are not in")
    spool = Path(line.rpartition(" ")[2])
    assert list(spool.glob("*.jsonl")), line
    shutil.rmtree(spool)
    assert len(lines_with(job, "could not be saved")) == 1
    assert "Traceback" not in job.said()
    proxy.heal()
    store = open_store(weed_s3.uri())
    newest = newest_step(store)
    again = bench.start(weed_s3.uri(), {"train.steps": newest + 20})
    assert set(again.wait()) == {0}, again.said()
    assert_same_training(store, bench.reference(), min(newest + 20, 100))


@ONE_MESH
def test_clock_an_hour_off_is_one_line_and_loses_nothing(bench: Bench, weed_s3: S3Place, proxy: FaultyProxy) -> None:
    job = bench.start(weed_s3.uri(), {"train.steps": 1_000_000}, environment=through(proxy, **FEW_TRIES))
    job.wait_for("checkpoint committed: step 5,")
    proxy.inject(Skew(3600.0, refuse=True))
    job.wait_for("checkpoint failed:")
    proxy.heal()
    # The log would be waited for half a minute at the end.
    proxy.inject(Skew(3600.0, refuse=True), key="attempts/")
    job.send(signal.SIGTERM)
    assert set(job.wait()) == {1}, job.said()
    assert all("clock" in line for line in lines_with(job, "checkpoint failed:"))
    assert len(lines_with(job, "could not be saved")) == 1
    assert "Traceback" not in job.said()
    store = open_store(weed_s3.uri())
    newest = newest_step(store)
    assert newest >= 5
    proxy.inject(Skew(3600.0, refuse=True))
    refused = bench.start(weed_s3.uri(), {"train.steps": newest + 20}, environment=through(proxy, **FEW_TRIES))
    assert set(refused.wait()) == {2}, refused.said()
    assert len(lines_with(refused, "clock")) == 1
    proxy.heal()
    proxy.inject(Skew(3600.0))
    again = bench.start(weed_s3.uri(), {"train.steps": newest + 20}, environment=through(proxy))
    assert set(again.wait()) == {0}, again.said()
    assert f"resumed: step {newest}" in again.said()
    assert_same_training(store, bench.reference(), min(newest + 20, 100))
