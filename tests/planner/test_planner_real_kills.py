"""The goodput that a plan says is that of a run whose process is killed again and again."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from planner.goodput import Losses, goodput
from tests.seeds import chance
from trainer.checkpoint.lineage.lease import committed
from trainer.environment import ATTEMPT
from trainer.metrics.goodput import goodput as share_of
from trainer.metrics.goodput import seconds_of
from trainer.metrics.reader import read_events, read_generations
from trainer.metrics.timeline import COMMITTED
from trainer.node.launcher import LocalJob
from trainer.run import journal
from trainer.run.past import past
from trainer.storage import ObjectStore, open_store

KILLS = 18
"""Of 1,000 simulated runs with so many, all had the law's goodput within 0.8 points where starts differ by a tenth, and all
but one within 2 points where they differ by a third: kills end slow starts more often, and the mean of the others is low."""
MTBF_STARTS, LEAST_MTBF_S = 6, 8.0
"""Starts that the mean time between kills is as long as: one kill in seven strikes a start. Where starts are fast it is still a
dozen intervals between saves."""
EVERY_STEPS = 5
STEP_S = 0.1
"""A pause stands in for computation. What the loop does between steps, some 0.2 ms, is small beside it, as in a real training:
neither the plan nor the run's accounts call it training."""
CONFIG = """
[run]
uri = "{uri}"
[task]
name = "tests.torture.paced_task:Paced"
pace_s = {pace_s}
until = "{uri}/never"
[train]
steps = {steps}
global_batch = 2
micro_batch = 2
[schedule]
kind = "constant"
[checkpoint]
every_steps = {every_steps}
[parallel]
device = "cpu"
"""


def lifetimes(mean_s: float) -> list[float]:
    """Return seconds from each launch to its kill: the mean of each of `KILLS` equal shares of an exponential distribution, in
    random order. Independent draws would need hundreds of kills for the same accuracy."""
    left = [share / KILLS for share in range(KILLS, -1, -1)]
    below = [part - part * math.log(part) if part else 0.0 for part in left]
    found = [mean_s * KILLS * (more - less) for more, less in pairwise(below)]
    chance("lifetimes").shuffle(found)
    return found


def launch(store: ObjectStore, config: Path, life_s: float | None) -> dict[str, object]:
    """Start a rank, kill it after so many seconds or let it end, and return the journal's record of it."""
    number = journal.begin(store, ["this"], "a test")
    kill_at = math.inf if life_s is None else time.monotonic() + life_s
    job = LocalJob(["train", str(config)], 1, {**os.environ, ATTEMPT: str(number)})
    while job.running() and time.monotonic() < kill_at:
        time.sleep(0.002)
    assert life_s is None or job.running(), "ended before it was killed"
    job.send(signal.SIGKILL)
    return journal.finish(store, number, job.wait())


def start_seconds(store: ObjectStore) -> list[float]:
    """Return the seconds from each launch to its first step, of those that have logged one."""
    generations = read_generations(store)
    return [
        record["start_s"] - generations[record["generation"]][0]["step_seconds"]
        for record in journal.read(store)
        if "start_s" in record
    ]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write(folder: Path, name: str, steps: int) -> tuple[ObjectStore, Path]:
    file = folder / f"{name}.toml"
    uri = folder / name
    file.write_text(CONFIG.format(uri=uri, steps=steps, pace_s=STEP_S, every_steps=EVERY_STEPS), encoding="utf-8")
    return open_store(str(uri)), file


@pytest.mark.timeout(1800)
def test_goodput_of_a_run_with_kills_is_the_planned_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calm, config = write(tmp_path, "calm", EVERY_STEPS)
    launch(calm, config, None)
    store, config = write(tmp_path, "run", 10**6)
    for life_s in lifetimes(max(LEAST_MTBF_S, MTBF_STARTS * mean(start_seconds(calm)))):
        launch(store, config, life_s)
    generations, events, ended = read_generations(store), read_events(store), journal.read(store)[-1]["ended"]
    # As the next launch would count: steps after the newest checkpoint are lost with the last kill.
    first, step = journal.first_started(store), committed(store)[-1].step
    known = past(generations.items(), events, first, generation=max(generations) + 1, step=step)
    assert known.began is not None
    accounted = share_of(known.useful_s, known.began, ended)
    records = [record for own in generations.values() for record in own]
    losses = Losses(
        mtbf_s=(ended - known.began) / KILLS,
        restart_s=mean(start_seconds(store)),
        stall_s=mean([record["blocked_seconds"] for record in records if record["blocked_seconds"]]),
        commit_s=mean([event["seconds"] for event in events if event["event"] == COMMITTED]),
    )
    planned = goodput(EVERY_STEPS * mean([seconds_of(record) for record in records]), losses)
    assert planned == pytest.approx(accounted, abs=0.02), losses
    with capsys.disabled():
        print(f"{KILLS} kills: goodput {accounted:.1%}, planned {planned:.1%} of {losses}")
