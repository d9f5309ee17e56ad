"""Promises of pruning: it removes what the options do not keep, and wherever it is killed the newest checkpoint still loads."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from tests.checkpoint.stores import Asking
from tests.checkpoint.written import assert_holds, flip_bit, manifests_of, put_lease, sample_state, write_steps
from trainer.checkpoint.format.layout import ATTEMPTS, MANIFESTS, ManifestId
from trainer.checkpoint.lineage.lease import live_manifests, read_lease
from trainer.checkpoint.lineage.prune import Committed, PruneReport, milestones, plan_prune, prune
from trainer.checkpoint.load.parts import read_manifest
from trainer.config import CheckpointConfig
from trainer.storage import CorruptObjectError, ObjectStore, open_store
from trainer.storage.local import LocalStore

DAY = 24 * 3600.0


def attempts_of(store: ObjectStore) -> set[str]:
    return {info.key.split("/")[1] for info in store.list(ATTEMPTS)}


ids = st.builds(ManifestId, st.integers(1, 4), st.integers(1, 60))
committed = st.builds(Committed, ids, st.none() | st.floats(0, 10) | st.just(math.nan), st.booleans())


@given(st.lists(committed, max_size=25, unique_by=lambda c: c.id), st.integers(2, 5), st.integers(0, 30), st.booleans())
def test_plan_keeps_newest_whole_ones_milestones_and_the_best(
    live: list[Committed], keep_last: int, every: int, best: bool
) -> None:
    options = CheckpointConfig(keep_last=keep_last, keep_every_steps=every, keep_best=best)
    doomed = plan_prune(live, options)
    kept = {c.id for c in live} - set(doomed)
    whole = sorted((c.id for c in live if c.whole), reverse=True)
    assert kept.issuperset(whole[:keep_last])
    assert kept.issuperset(milestones((c.id for c in live), every))
    assert all(not doomed or i < whole[keep_last - 1] for i in doomed)
    metrics = [c.metric for c in live if c.metric is not None and not math.isnan(c.metric)]
    if best and metrics:
        assert min(metrics) in [c.metric for c in live if c.id in kept]
    assert doomed == sorted(doomed)
    spared = [c.id for c in live if c.id in kept and c.id not in whole[:keep_last] and (not whole or c.id < whole[-1])]
    if len(whole) >= keep_last and not every and not best:
        assert spared == []


@pytest.mark.parametrize(
    ("steps", "every", "kept"),
    [([10, 20, 30], 0, []), ([7, 12, 18, 23, 31], 10, [12, 23, 31]), ([10, 20, 30], 10, [10, 20, 30]), ([5], 10, [])],
)
def test_milestones_are_the_first_saves_from_each_multiple_on(steps: list[int], every: int, kept: list[int]) -> None:
    assert [i.step for i in milestones((ManifestId(1, s) for s in steps), every)] == kept


def test_later_save_never_unseats_a_milestone_kept_earlier() -> None:
    options = CheckpointConfig(keep_last=2, keep_every_steps=10)
    alive: list[ManifestId] = []
    for step in range(3, 100, 4):
        alive.append(ManifestId(1, step))
        doomed = plan_prune([Committed(i, None, True) for i in alive], options)
        alive = [i for i in alive if i not in doomed]
    assert [i.step for i in alive] == [11, 23, 31, 43, 51, 63, 71, 83, 91, 95, 99]


def test_old_checkpoints_go_whole_and_the_kept_ones_still_load(store: LocalStore) -> None:
    put_lease(store, 1, (1, None))
    write_steps(store, [10, 20, 30, 40, 50])
    report = prune(store, CheckpointConfig(keep_last=2), generation=1)
    assert [i.step for i in report.removed] == [10, 20, 30]
    assert [i.step for i in manifests_of(store)] == [40, 50]
    assert {name.split("-")[1] for name in attempts_of(store)} == {"0000000040", "0000000050"}
    assert report.bytes > 0
    for manifest_id in manifests_of(store):
        assert_holds(store, manifest_id, sample_state(manifest_id.step))


def test_the_best_by_metric_stays_however_old(store: LocalStore) -> None:
    put_lease(store, 1, (1, None))
    write_steps(store, [10], metric=2.5)
    write_steps(store, [20], metric=1.5)
    write_steps(store, [30, 40, 50], metric=2.0)
    prune(store, CheckpointConfig(keep_last=2))
    assert [i.step for i in manifests_of(store)] == [20, 40, 50]


def test_a_dry_run_names_what_would_go_and_removes_nothing(store: LocalStore) -> None:
    put_lease(store, 1, (1, None))
    write_steps(store, [10, 20, 30])
    before = {info.key for info in store.list()}
    report = prune(store, CheckpointConfig(keep_last=2), dry_run=True)
    assert [i.step for i in report.removed] == [10]
    assert {info.key for info in store.list()} == before


@pytest.mark.parametrize("harmed", [40, 50])
@pytest.mark.parametrize("how", ["missing part", "short part", "damaged manifest"])
def test_checkpoint_whose_objects_are_gone_is_not_kept(store: LocalStore, harmed: int, how: str) -> None:
    put_lease(store, 1, (1, None))
    write_steps(store, [20, 30, 40, 50])
    manifest = read_manifest(store, ManifestId(1, harmed))
    if how == "missing part":
        store.delete(manifest.parts[1].data_key)
    elif how == "short part":
        store.put(manifest.parts[1].data_key, store.read(manifest.parts[1].data_key)[0][:-1])
    else:
        flip_bit(store, manifest.id.key, 40)
    prune(store, CheckpointConfig(keep_last=2))
    assert [i.step for i in manifests_of(store)] == [30, 40, 50]


def age(store: LocalStore, key: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(Path(store.uri) / key, (then, then))


def test_dead_commits_and_orphans_go_only_when_old_and_outdated(store: LocalStore) -> None:
    write_steps(store, [10, 20, 30], generation=1)
    write_steps(store, [25, 35], generation=2)
    put_lease(store, 3, (1, None), (2, ManifestId(1, 20)), (3, ManifestId(2, 35)))
    for generation in (2, 3):
        for name in (f"{generation:06d}-0000000090-aaaaaaaa", f"{generation:06d}-0000000091-bbbbbbbb"):
            store.put(f"{ATTEMPTS}{name}/rank-00000.bin", b"left over")
            if name.endswith("aaaaaaaa"):
                age(store, f"{ATTEMPTS}{name}/rank-00000.bin", 2 * DAY)
    store.put(f"{ATTEMPTS}mine/notes.txt", b"not ours")
    age(store, f"{ATTEMPTS}mine/notes.txt", 2 * DAY)
    young = prune(store, CheckpointConfig(keep_last=2, keep_every_steps=1))
    assert young.removed_dead == []
    assert young.removed_orphans == ["000002-0000000090-aaaaaaaa"]
    age(store, ManifestId(1, 30).key, 2 * DAY)
    old = prune(store, CheckpointConfig(keep_last=2, keep_every_steps=1))
    assert old.removed_dead == [ManifestId(1, 30)]
    left = attempts_of(store)
    assert {"000002-0000000091-bbbbbbbb", "000003-0000000090-aaaaaaaa", "mine"} <= left
    assert "000001-0000000030-0001001e" not in left
    assert manifests_of(store) == [ManifestId(1, 10), ManifestId(1, 20), ManifestId(2, 25), ManifestId(2, 35)]


def test_the_clock_of_this_machine_makes_nothing_old(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put_lease(store, 2, (1, None), (2, ManifestId(1, 20)))
    write_steps(store, [10, 20])
    store.put(f"{ATTEMPTS}000001-0000000015-aaaaaaaa/rank-00000.bin", b"being written")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert prune(store, CheckpointConfig()).removed_orphans == []


def test_attempts_of_a_damaged_manifest_are_no_orphans(store: LocalStore) -> None:
    write_steps(store, [10, 20, 30])
    put_lease(store, 2, (1, None), (2, ManifestId(1, 30)))
    flip_bit(store, ManifestId(1, 30).key, 40)
    for info in list(store.list(ATTEMPTS)):
        age(store, info.key, 2 * DAY)
    assert prune(store, CheckpointConfig()).removed_orphans == []
    assert len(attempts_of(store)) == 3


def test_a_job_that_lost_the_run_prunes_nothing(store: LocalStore) -> None:
    write_steps(store, [10, 20, 30])
    put_lease(store, 2, (1, None))
    report = prune(store, CheckpointConfig(keep_last=2), generation=1)
    assert (report.removed, report.stopped) == ([], "a newer job owns this run")
    assert len(manifests_of(store)) == 3


class Stopped(Exception):
    """Stands for a SIGKILL: nothing after it happens."""


@pytest.mark.slow
def test_killed_pruning_leaves_loadable_ones_and_next_finishes(tmp_path: Path) -> None:
    calls, done = 0, False
    while not done:
        store = LocalStore(str(tmp_path / str(calls)))
        put_lease(store, 2, (1, None), (2, ManifestId(1, 50)))
        write_steps(store, [10, 20, 30, 40, 50])
        options = CheckpointConfig(keep_last=2)
        allowed = iter(range(calls))

        def spend(*_: object, allowed: Iterator[int] = allowed) -> None:
            if next(allowed, None) is None:
                raise Stopped

        try:
            prune(Asking(store.uri, spend), options)
            done = True
        except Stopped:
            pass
        live = live_manifests(manifests_of(store), read_lease(store).lineage, 2)  # type: ignore[union-attr]
        assert [i.step for i in live[:2]] == [50, 40]
        for manifest_id in live:
            assert_holds(store, manifest_id, sample_state(manifest_id.step))
        for info in list(store.list(ATTEMPTS)):
            age(store, info.key, 2 * DAY)
        prune(store, options)
        assert {name.split("-")[1] for name in attempts_of(store)} == {"0000000040", "0000000050"}
        calls += 1
    assert calls > 20


class Taken(LocalStore):
    """A newer job takes the run as soon as the first manifest was removed."""

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        super().delete(key, if_match=if_match)
        if key.startswith(MANIFESTS):
            put_lease(self, 2, (1, None))


def test_pruning_ends_as_soon_as_a_newer_job_takes_the_run(store: LocalStore) -> None:
    put_lease(store, 1, (1, None))
    write_steps(store, [10, 20, 30, 40])
    report: PruneReport = prune(Taken(store.uri), CheckpointConfig(keep_last=2))
    assert [i.step for i in report.removed] == [10]
    assert "took this run" in report.stopped


def test_manifest_of_newer_format_stops_pruning_before_removals(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_lease(store, 1, (1, None))
    write_steps(store, [10, 20, 30])
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.format.records.FORMAT", 2)
        write_steps(store, [40])
    with pytest.raises(UserError, match="newer Lustrain"):
        prune(store, CheckpointConfig(keep_last=2))
    assert len(manifests_of(store)) == 4


@pytest.mark.slow
def test_pruning_and_loading_work_on_real_s3_servers(s3: object) -> None:
    store = open_store(s3.uri("prune"))  # type: ignore[attr-defined]
    put_lease(store, 1, (1, None))
    write_steps(store, [10, 20, 30])
    assert [i.step for i in prune(store, CheckpointConfig(keep_last=2), generation=1).removed] == [10]
    assert [i.step for i in manifests_of(store)] == [20, 30]
    assert len(attempts_of(store)) == 2
    assert_holds(store, ManifestId(1, 30), sample_state(30))
    flip_bit(store, read_manifest(store, ManifestId(1, 30)).parts[0].data_key, 1000)
    with pytest.raises(CorruptObjectError, match="rank 0"):
        assert_holds(store, ManifestId(1, 30), sample_state(30))
