"""Two jobs on one run: the newer one wins at once and for good, whatever the older one still does."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from tests.torture.conftest import REFERENCE_STEPS, Bench
from tests.torture.small_run import assert_same_training, committed, events
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import Manifest, encode
from trainer.checkpoint.lineage.lease import Lease, read_lease
from trainer.checkpoint.load.parts import read_manifest
from trainer.checkpoint.save.commit import commit
from trainer.errors import LostRunError
from trainer.storage import ObjectStore, open_store

pytestmark = pytest.mark.slow

ENDLESS = {"train.steps": 1_000_000}
SOON_S = 10.0


@pytest.mark.parametrize(
    "notices",
    [{"checkpoint.every_steps": 5}, {"checkpoint.every_steps": 1_000_000, "checkpoint.lease_poll_s": 0.1}],
    ids=["at its next commit", "between two commits"],
)
def test_the_older_job_stops_with_86_on_all_ranks_and_the_newer_one_finishes_bit_identical(
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


def test_a_zombies_late_manifest_never_wins_even_if_the_newer_job_died_before_its_first_commit(
    bench: Bench, tmp_path: Path
) -> None:
    uri = f"{tmp_path}/run"
    assert bench.start(uri, {"train.steps": 10}).wait() == [0]
    store = open_store(uri)
    record = read_lease(store)
    assert record is not None
    zombie = Lease(store, record, store.read("lease.json")[1])
    late = later_copy(store, ManifestId(1, 10), step=40)

    newer = bench.start(uri, {**ENDLESS, "checkpoint.every_steps": 1_000_000})
    newer.wait_for("resumed: step 10")
    newer.send(signal.SIGKILL)
    newer.wait()
    with pytest.raises(LostRunError):
        commit(store, zombie, late)
    # The put that was on its way when the zombie had just looked at its lease:
    store.put(late.id.key, encode(late), if_absent=True)

    last = bench.start(uri, {"train.steps": 50})
    assert last.wait() == [0], last.said()
    assert [event["step"] for event in events(store, "resumed")][-1] == 10
    assert_same_training(store, bench.reference(), 50)


def later_copy(store: ObjectStore, manifest_id: ManifestId, step: int) -> Manifest:
    """A whole manifest of the same job for a later step, as a job would put that does not know that it was replaced."""
    manifest = read_manifest(store, manifest_id)
    state = {**manifest.state, "progress": {**manifest.state["progress"], "step": step}}
    return dataclasses.replace(manifest, step=step, state=state)
