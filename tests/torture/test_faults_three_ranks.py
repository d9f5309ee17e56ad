"""Three ranks sum gradients in an order that depends on DDP's buckets: a resume in the middle must meet the same one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.torture.conftest import REFERENCE_STEPS, Bench
from tests.torture.small_run import assert_same_training, newest_step
from trainer.storage import open_store


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_resume_of_three_ranks_is_bit_identical(bench: Bench, tmp_path: Path, number: int) -> None:
    uri = f"{tmp_path}/run"
    reference = bench.reference(3)
    job = bench.start(uri, {"train.steps": 1_000_000}, ranks=3)
    job.wait_for("checkpoint committed: step 5,")
    job.send(number)
    expected = 85 if number == signal.SIGTERM else -signal.SIGKILL
    assert job.wait() == [expected] * 3, job.said()
    store = open_store(uri)
    newest = newest_step(store)
    assert 5 <= newest < REFERENCE_STEPS - 10
    again = bench.start(uri, {"train.steps": REFERENCE_STEPS}, ranks=3)
    assert again.wait() == [0] * 3, again.said()
    assert f"resumed: step {newest}," in again.said()
    assert_same_training(store, reference, REFERENCE_STEPS)
