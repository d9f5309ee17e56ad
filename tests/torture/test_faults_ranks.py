"""Ranks among each other: how they end together, how they learn of a dead one, and in which order three sum gradients."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.torture.conftest import REFERENCE_STEPS, Bench
from tests.torture.small_run import assert_same_training, newest_step
from trainer.errors import EXIT_PEERS
from trainer.storage import open_store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_a_rank_is_one_line_and_exit_75_on_the_others(bench: Bench, tmp_path: Path, victim: int) -> None:
    job = bench.start(f"{tmp_path}/run", {"train.steps": 1_000_000}, ranks=2)
    job.wait_for("checkpoint committed: step 5,")
    job.send(signal.SIGKILL, [victim])
    codes = job.wait()
    survivor = 1 - victim
    assert codes[survivor] == EXIT_PEERS, job.said()
    told = [line for line in job.ranks[survivor].said().splitlines() if "another rank is gone" in line]
    assert len(told) == 1, job.said()
    assert told[0].startswith(f"rank {survivor} of 2: ")
    assert "Traceback" not in job.said()
    assert "frame #" not in job.said()


def test_every_rank_hears_last_saves_end_before_rank_0_is_gone(bench: Bench, tmp_path: Path) -> None:
    """Rank 0 hosts the ranks' store; a rank that still asks it would end with 75 where the job is done."""
    for attempt in range(1, 5):
        job = bench.start(f"{tmp_path}/run", {"train.steps": 6 * attempt}, ranks=3)
        assert job.wait() == [0, 0, 0], job.said()


@pytest.mark.parametrize(
    ("bench", "number"),
    [("ddp", signal.SIGTERM), ("ddp", signal.SIGKILL), ("fsdp", signal.SIGKILL)],
    indirect=["bench"],
)
def test_a_resume_of_three_ranks_is_bit_identical(bench: Bench, tmp_path: Path, number: int) -> None:
    """What three numbers sum to depends on their order, and that on DDP's buckets, which settle in the first step."""
    uri = f"{tmp_path}/run"
    reference = bench.reference(3)
    job = bench.start(uri, {"train.steps": 1_000_000}, ranks=3)
    job.wait_for("checkpoint committed: step 5,")
    job.send(number)
    expected = 85 if number == signal.SIGTERM else -signal.SIGKILL
    assert job.wait() == [expected] * 3, job.said()
    store = open_store(uri)
    newest = newest_step(store)
    assert newest >= 5
    steps = max(REFERENCE_STEPS, newest + 10)
    again = bench.start(uri, {"train.steps": steps}, ranks=3)
    assert again.wait() == [0] * 3, again.said()
    assert f"resumed: step {newest}," in again.said()
    assert_same_training(store, reference, REFERENCE_STEPS)
