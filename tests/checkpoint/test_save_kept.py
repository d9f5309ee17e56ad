"""What stays after saves: the newest fast copies in a tier, and the checkpoints that the options keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.saving import Events, checkpointer, save_one
from tests.checkpoint.written import manifests_of
from tests.processes import wait_until
from trainer.checkpoint.format.layout import ATTEMPTS, ManifestId, tier_root
from trainer.checkpoint.load.parts import read_manifest
from trainer.config import TierConfig
from trainer.storage import ObjectStore, StorageError, open_store
from trainer.storage.local import LocalStore


def test_a_tier_keeps_the_last_commit_and_the_newest_copy_only(store: ObjectStore, tmp_path: Path) -> None:
    tier = TierConfig(kind="nvme", path=str(tmp_path / "nvme"))
    with checkpointer(store, Events(), tiers=(tier,)) as saver:
        assert all(save_one(saver, step).committed for step in (1, 2, 3, 4))
    copies = open_store(tier_root(tier.path, store.uri))
    kept = {info.key.split("/")[1] for info in copies.list(ATTEMPTS)}
    assert kept == {read_manifest(store, ManifestId(1, step)).attempt for step in (3, 4)}


@pytest.mark.slow
def test_tier_keeps_the_checkpoint_a_new_generation_began_from(store: ObjectStore, tmp_path: Path) -> None:
    tier = TierConfig(kind="nvme", path=str(tmp_path / "nvme"))
    with checkpointer(store, Events(), tiers=(tier,)) as saver:
        for step in (1, 2):
            save_one(saver, step)
    begun_from = ManifestId(1, 2)
    with checkpointer(store, Events(), tiers=(tier,), parent=begun_from) as saver:
        save_one(saver, 3)
    copies = open_store(tier_root(tier.path, store.uri))
    kept = {info.key.split("/")[1] for info in copies.list(ATTEMPTS)}
    assert kept == {read_manifest(store, commit).attempt for commit in (begun_from, ManifestId(2, 3))}
    assert read_manifest(store, ManifestId(2, 3)).parent == begun_from


@pytest.mark.slow
def test_old_checkpoints_are_pruned_as_the_options_say(store: ObjectStore) -> None:
    events = Events()
    with checkpointer(store, events, keep_last=2) as saver:
        for step in range(1, 6):
            save_one(saver, step)
            wait_until(lambda: len(manifests_of(store)) <= 2)
        wait_until(lambda: len(events.of("checkpoints_pruned")) == 3)
    assert manifests_of(store) == [ManifestId(1, 4), ManifestId(1, 5)]


def test_job_without_commits_prunes_what_killed_jobs_left(store: ObjectStore) -> None:
    with checkpointer(store, Events(), keep_last=9) as saver:
        for step in range(1, 5):
            save_one(saver, step)
    assert len(manifests_of(store)) == 4
    with checkpointer(store, Events(), keep_last=2, parent=ManifestId(1, 4)):
        pass
    assert manifests_of(store) == [ManifestId(1, 3), ManifestId(1, 4)]


def test_pruning_that_fails_is_reported_and_costs_no_checkpoint(tmp_path: Path) -> None:
    class Undeletable(LocalStore):
        def delete(self, key: str, *, if_match: str | None = None) -> None:
            raise StorageError("deleting is not allowed here")

    store, events = Undeletable(str(tmp_path / "run")), Events()
    with checkpointer(store, events, keep_last=2) as saver:
        assert all(save_one(saver, step).committed for step in (1, 2, 3))
        wait_until(lambda: events.of("prune_failed"))
    assert "not allowed" in events.of("prune_failed")[0]["detail"]
