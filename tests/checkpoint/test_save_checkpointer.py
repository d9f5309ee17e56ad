"""Promises of a save: it blocks for a copy only, commits all or nothing, and whatever fails, training goes on."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from lustrain.problem import UserError
from tests.checkpoint.saving import (
    ALL,
    PATIENCE_S,
    Events,
    checkpointer,
    held_up,
    sample_tensors,
    save_one,
    small_disk,
    stopped,
    writer_pid,
)
from tests.checkpoint.stores import Asking
from tests.checkpoint.written import assert_holds, manifests_of
from tests.processes import alive, wait_until
from tests.sharded import mesh_of_two, shard_on
from trainer.checkpoint.format.layout import ATTEMPTS, ManifestId, index_key, tier_root
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.load.parts import read_manifest
from trainer.config import TierConfig
from trainer.errors import LostRunError
from trainer.parallel.shards import Axis
from trainer.parallel.votes import StoreVotes
from trainer.storage import ObjectStore, StorageError, open_store
from trainer.storage.local import LocalStore


def test_what_was_saved_is_what_loads_though_training_changed_it(store: ObjectStore) -> None:
    tensors, events = sample_tensors(), Events()
    state = {"progress": {"step": 7}}
    with checkpointer(store, events) as saver:
        blocked = saver.save(7, tensors, state, {"note": "x"})
        for tensor in tensors.values():
            tensor.zero_()
        state["progress"]["step"] = 8
        (outcome,) = saver.wait(PATIENCE_S)
        assert not saver.busy
        assert saver.estimate_s == outcome.seconds >= blocked > 0
    assert outcome.committed
    assert_holds(store, ManifestId(1, 7), ALL)
    manifest = read_manifest(store, ManifestId(1, 7))
    assert (manifest.state, manifest.about) == ({"progress": {"step": 7}}, {"note": "x"})
    assert outcome.bytes == manifest.data_bytes
    assert [kind for kind, _ in events.seen] == ["checkpoint_started", "checkpoint_committed"]


@pytest.mark.slow
def test_state_that_changes_size_between_saves_is_saved_whole(store: ObjectStore) -> None:
    with checkpointer(store, Events()) as saver:
        for step, rows in enumerate((10, 9000, 3), start=1):
            save_one(saver, step, sample_tensors(step, rows))
    for step, rows in enumerate((10, 9000, 3), start=1):
        assert_holds(store, ManifestId(1, step), sample_tensors(step, rows))


def test_a_save_that_finds_one_in_flight_is_skipped_and_says_so(store: ObjectStore) -> None:
    events = Events()
    with checkpointer(store, events) as saver:
        with stopped(writer_pid()):
            saver.save(1, ALL, {}, {})
            assert saver.busy
            assert saver.remaining_s is not None
            saver.save(2, ALL, {}, {})
            (skipped,) = saver.poll()
        (first,) = saver.wait(PATIENCE_S)
        assert saver.remaining_s is None
    assert (skipped.step, skipped.committed) == (2, False)
    assert "step 1" in skipped.detail
    assert (first.step, first.committed) == (1, True)
    assert manifests_of(store) == [ManifestId(1, 1)]
    assert len(events.of("save_skipped")) == 1


def test_urgent_save_does_not_wait_for_the_one_in_flight(store: ObjectStore) -> None:
    with checkpointer(store, Events()) as saver:
        with stopped(writer_pid()):
            saver.save(1, sample_tensors(1), {}, {})
            saver.save(2, sample_tensors(2), {}, {}, urgent=True)
        assert [(o.step, o.committed) for o in saver.wait(PATIENCE_S)] == [(1, True), (2, True)]
        save_one(saver, 3, sample_tensors(3))
    for step in (1, 2, 3):
        assert_holds(store, ManifestId(1, step), sample_tensors(step))


@pytest.mark.slow
def test_writer_killed_during_a_save_costs_that_save_and_no_more(store: ObjectStore) -> None:
    events = Events()
    with checkpointer(store, events) as saver:
        with held_up(store) as under_way:
            saver.save(1, sample_tensors(1), {}, {})
            wait_until(under_way)
            os.kill(writer_pid(), signal.SIGKILL)
            (lost,) = saver.wait(PATIENCE_S)
        saved = save_one(saver, 2, sample_tensors(2))
    assert (lost.step, lost.committed) == (1, False)
    assert "SIGKILL" in lost.detail
    assert (saved.step, saved.committed) == (2, True)
    assert manifests_of(store) == [ManifestId(1, 2)]
    assert len(events.of("writer_restarted")) == 1


@pytest.mark.slow
def test_a_writer_killed_between_saves_costs_nothing(store: ObjectStore) -> None:
    events = Events()
    with checkpointer(store, events) as saver:
        pid = writer_pid()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))
        assert save_one(saver, 1).committed
    assert len(events.of("writer_restarted")) == 1


def test_job_that_lost_its_run_commits_nothing_and_names_owner(store: ObjectStore) -> None:
    with checkpointer(store, Events()) as saver:
        save_one(saver, 1)
        Lease.acquire(store, "the newer job")
        with pytest.raises(LostRunError, match="the newer job") as lost:
            save_one(saver, 2)
        with pytest.raises(LostRunError):
            saver.save(3, ALL, {}, {})
        with pytest.raises(LostRunError):
            saver.poll()
    assert "generation 2" in str(lost.value)
    assert lost.value.exit_code == 86
    assert manifests_of(store) == [ManifestId(1, 1)]


class FlakyStore(LocalStore):
    """A store in trouble around manifests: it loses the answer after storing, refuses, or holds a foreign object."""

    def __init__(self, uri: str, mood: str) -> None:
        super().__init__(uri)
        self.mood = mood

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        if not key.startswith("manifests/") or not self.mood:
            return super().put(key, body, if_absent=if_absent, if_match=if_match)
        if self.mood == "answer lost":
            super().put(key, body, if_absent=if_absent, if_match=if_match)
            raise StorageError("the answer was lost")
        if self.mood == "answer lost, then retried":
            super().put(key, body, if_absent=if_absent, if_match=if_match)
            return super().put(key, body, if_absent=if_absent, if_match=if_match)
        if self.mood == "foreign object":
            super().put(key, b"{}")
            return super().put(key, body, if_absent=if_absent, if_match=if_match)
        raise StorageError("the store is away")


@pytest.mark.parametrize("mood", ["answer lost", "answer lost, then retried"])
def test_commit_whose_answer_got_lost_counts_as_a_success(tmp_path: Path, mood: str) -> None:
    store = FlakyStore(str(tmp_path / "run"), mood)
    with checkpointer(store, Events()) as saver:
        assert save_one(saver, 1).committed
    assert_holds(store, ManifestId(1, 1), ALL)


@pytest.mark.parametrize("mood", ["away", "foreign object"])
def test_refused_commit_is_reported_once_and_next_save_retries(tmp_path: Path, mood: str) -> None:
    store, events = FlakyStore(str(tmp_path / "run"), mood), Events()
    with checkpointer(store, events) as saver:
        refused = save_one(saver, 1)
        store.mood = ""
        saved = save_one(saver, 2)
    assert (refused.committed, saved.committed) == (False, True)
    (failure,) = events.of("checkpoint_failed")
    assert failure["step"] == 1
    assert "\n" not in failure["detail"]


def test_second_try_at_a_committed_step_reports_the_first_commit(store: ObjectStore) -> None:
    with checkpointer(store, Events()) as saver:
        save_one(saver, 1)
        first = read_manifest(store, ManifestId(1, 1)).attempt
        again = save_one(saver, 1, urgent=True)
    assert again.committed
    assert first in again.detail
    assert_holds(store, ManifestId(1, 1), ALL)


def test_a_part_that_vanished_before_the_commit_prevents_it(tmp_path: Path) -> None:
    def steal(request: str, key: str) -> None:
        if request == "stat" and key.startswith(ATTEMPTS) and key.endswith(".json"):
            (tmp_path / "run" / key).unlink()

    store = Asking(str(tmp_path / "run"), steal)
    with checkpointer(store, Events()) as saver:
        outcome = save_one(saver, 1)
    assert not outcome.committed
    assert "rank 0" in outcome.detail
    assert manifests_of(store) == []


def test_full_disk_under_a_tier_is_reported_and_the_run_saves(store: ObjectStore, tmp_path: Path) -> None:
    events = Events()
    with small_disk(tmp_path / "small", 1) as small:
        good = TierConfig(kind="nvme", path=str(tmp_path / "nvme"))
        tiers = (good, TierConfig(kind="memory", path=str(small)))
        big = {"weight": torch.randn(500_000)}
        with checkpointer(store, events, tiers=tiers) as saver:
            assert save_one(saver, 1, big).committed
    (failure,) = events.of("tier_failed")
    assert failure["tier"].startswith(str(small))
    assert "no space left" in failure["detail"]
    assert_holds(store, ManifestId(1, 1), big)
    copies = open_store(tier_root(good.path, store.uri))
    assert copies.stat(index_key(read_manifest(store, ManifestId(1, 1)).attempt, 0)).size > 0


def test_full_disk_under_run_costs_saves_until_there_is_space(tmp_path: Path) -> None:
    events = Events()
    with small_disk(tmp_path / "small", 8) as small:
        store = open_store(str(small / "run"))
        (small / "ballast").write_bytes(bytes(6 << 20))
        big = {"weight": torch.randn(1_000_000)}
        with checkpointer(store, events) as saver:
            failed = save_one(saver, 1, big)
            (small / "ballast").unlink()
            saved = save_one(saver, 2, big)
        assert (failed.committed, saved.committed) == (False, True)
        assert "no space left" in failed.detail
        assert "\n" not in failed.detail
        assert_holds(store, ManifestId(1, 2), big)


def test_state_that_would_read_back_changed_is_refused_not_notes(store: ObjectStore) -> None:
    with checkpointer(store, Events()) as saver:
        with pytest.raises(ValueError, match="state"):
            saver.save(1, ALL, {"best": math.nan}, {})
        saver.save(1, ALL, {}, {"loss": math.nan, "path": Path("/x"), "list": [1.5, math.inf]})
        assert [outcome.committed for outcome in saver.wait(PATIENCE_S)] == [True]
    assert read_manifest(store, ManifestId(1, 1)).about == {"loss": "nan", "path": "/x", "list": [1.5, "inf"]}


def test_shard_of_tensor_is_refused_and_whole_tensors_still_save(store: ObjectStore) -> None:
    with checkpointer(store, Events()) as saver:
        with mesh_of_two() as mesh, pytest.raises(UserError) as refused:
            saver.save(1, {**ALL, "model/shard": shard_on(mesh)}, {}, {})
        assert [line.path for line in refused.value.problems] == ["model/shard"]
        assert save_one(saver, 2).committed
    assert manifests_of(store) == [ManifestId(1, 2)]


@pytest.mark.parametrize("others", [[], [Axis("replicate", 2, 1)]], ids=["half", "nothing"])
def test_shards_that_do_not_make_up_a_tensor_are_not_committed(store: ObjectStore, others: list[Axis]) -> None:
    """The other half, or all of it, would be on ranks that this job has not."""
    with checkpointer(store, Events(), mesh=[*others, Axis("dim 0", 2, 0)]) as saver, mesh_of_two() as mesh:
        outcome = save_one(saver, 1, {"model/half": shard_on(mesh)})
        assert not outcome.committed
        assert "model/half" in outcome.detail
    assert manifests_of(store) == []


def test_closing_waits_for_no_save_and_leaves_no_thread_or_child(store: ObjectStore) -> None:
    before = set(threading.enumerate())
    with checkpointer(store, Events()) as saver:
        pid = writer_pid()
        with stopped(pid):
            saver.save(1, ALL, {}, {})
            saver.close()
    assert not os.path.exists(f"/proc/{pid}")
    assert set(threading.enumerate()) <= before
    assert manifests_of(store) == []


def test_a_rank_whose_rank_0_is_silent_goes_on_training(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.save.saver.PLAN_S", 0.2)
    events = Events()
    with checkpointer(store, events, rank=1, world_size=2) as saver:
        saver.save(1, ALL, {}, {})
        (outcome,) = saver.poll()
        assert not outcome.committed
        assert "rank 0" in outcome.detail
        assert not saver.busy


def test_what_was_said_about_past_saves_is_forgotten(store: ObjectStore) -> None:
    board = HashStore()
    keys = []
    with checkpointer(store, Events(), votes=StoreVotes(board, 1)) as saver:
        for step in range(1, 6):
            save_one(saver, step)
            keys.append(board.num_keys())
    assert keys[-1] == keys[-2] == keys[1]
