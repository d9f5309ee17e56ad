"""Two jobs on one run: the newer one wins at once and for good, whatever the older one still does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.conftest import REFERENCE_STEPS, Bench
from tests.torture.small_run import assert_same_training, committed
from trainer.storage import open_store

pytestmark = pytest.mark.slow

ENDLESS = {"train.steps": 1_000_000}
SOON_S = 10.0


@pytest.mark.parametrize(
    "notices",
    [{"checkpoint.every_steps": 5}, {"checkpoint.every_steps": 1_000_000, "checkpoint.lease_poll_s": 0.1}],
    ids=["at its next commit", "between two commits"],
)
def test_older_job_stops_with_86_and_the_newer_ends_identical(
    bench: Bench, tmp_path: Path, notices: dict[str, object]
) -> None:
    uri = f"{tmp_path}/run"
    assert bench.start(uri, {"train.steps": 10}, ranks=2).wait() == [0, 0]
    older = bench.start(uri, {**ENDLESS, **notices}, ranks=2)
    older.wait_for("resumed: step 10")
    newer = bench.start(uri, {"train.steps": REFERENCE_STEPS}, ranks=2)
    newer.wait_for("resumed:")
    assert older.wait(SOON_S) == [86, 86], older.said()
    assert older.ranks[0].said().count("owns this run since") >= 1
    assert "Traceback" not in older.said()
    assert newer.wait() == [0, 0], newer.said()
    store = open_store(uri)
    assert_same_training(store, bench.reference(2), 10)
    assert {manifest.generation for manifest in committed(store)[-2:]} <= {2, 3}
    assert committed(store)[-1].step >= REFERENCE_STEPS
