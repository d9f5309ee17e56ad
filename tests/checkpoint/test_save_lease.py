"""Promises of the lease: one owner, the newest; and a checkpoint that an older job commits too late never wins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lustrain.problem import UserError
from tests.checkpoint.stores import FlippedOnce, Stuttering
from trainer.checkpoint.format.layout import LEASE, ManifestId
from trainer.checkpoint.format.records import Manifest, NewerFormatError, encode
from trainer.checkpoint.lineage.lease import Lease, LeaseRecord, LineageEntry, live_manifests, read_lease
from trainer.errors import LostRunError
from trainer.sealed import DamagedRecordError, seal
from trainer.storage import ObjectStore


def lineage_in(store: ObjectStore) -> tuple[LineageEntry, ...]:
    lease = read_lease(store)
    assert lease is not None
    return lease.lineage


def test_the_newer_job_wins_and_the_older_one_learns_from_whom(store: ObjectStore) -> None:
    older = Lease.acquire(store, "host-a, job 1")
    older.record_parent(None)
    older.check()
    newer = Lease.acquire(store, "host-b, job 2")
    for attempt in (older.check, lambda: older.record_parent(None)):
        with pytest.raises(LostRunError, match="host-b, job 2") as lost:
            attempt()
        assert "generation 2" in str(lost.value)
        assert "generation 1" in str(lost.value)
        assert "fix:" in str(lost.value)
    newer.check()
    newer.record_parent(ManifestId(1, 5))
    assert lineage_in(store) == (LineageEntry(1, None), LineageEntry(2, ManifestId(1, 5)))


def test_jobs_that_take_a_run_at_once_get_different_generations(store: ObjectStore) -> None:
    with ThreadPoolExecutor(6) as pool:
        leases = list(pool.map(lambda number: Lease.acquire(store, f"job {number}"), range(6)))
    assert sorted(lease.generation for lease in leases) == [1, 2, 3, 4, 5, 6]
    newest = max(leases, key=lambda lease: lease.generation)
    newest.check()
    for lease in leases:
        if lease is not newest:
            with pytest.raises(LostRunError):
                lease.check()


def test_a_take_or_record_whose_answer_got_lost_counts_once(tmp_path: Path) -> None:
    store = Stuttering(str(tmp_path / "run"))
    lease = Lease.acquire(store, "job")
    lease.record_parent(None)
    lease.check()
    assert lease.generation == 1
    assert lineage_in(store) == (LineageEntry(1, None),)


def test_a_job_whose_lease_was_removed_stops(store: ObjectStore) -> None:
    lease = Lease.acquire(store, "job")
    store.delete(LEASE)
    with pytest.raises(LostRunError, match="removed"):
        lease.check()


def test_damaged_or_newer_lease_is_one_line_with_the_fix(store: ObjectStore) -> None:
    Lease.acquire(store, "job")
    raw = store.read(LEASE)[0]
    for body in (raw.replace(b'"owner":"job"', b'"owner":"jab"'), seal({"version": 1})):
        store.put(LEASE, body)
        with pytest.raises(UserError, match="damaged") as damaged:
            Lease.acquire(store, "job")
        assert len(damaged.value.problems) == 1
        assert "fix:" in damaged.value.problems[0]
    store.put(LEASE, seal({"version": 2}))
    with pytest.raises(NewerFormatError, match="upgrade"):
        Lease.acquire(store, "job")


def test_a_lease_that_only_the_wire_damaged_is_read_again(store: ObjectStore) -> None:
    lease = Lease.acquire(store, "job")
    lease.record_parent(None)
    assert read_lease(FlippedOnce(store.uri)) == read_lease(store)
    assert Lease.acquire(FlippedOnce(store.uri), "next").generation == 2


def put_manifests(store: ObjectStore, *described: tuple[int, int, ManifestId | None]) -> None:
    """Commits of no tensors, by generation, step and parent."""
    for generation, step, parent in described:
        manifest = Manifest(generation, step, f"{generation:06d}-{step:010d}-00000000", parent, 1, "", (), {}, {})
        store.put(manifest.id.key, encode(manifest))


def test_a_removed_lease_is_rebuilt_from_the_manifests(store: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    put_manifests(store, (1, 10, None), (1, 20, None), (4, 25, ManifestId(1, 20)))
    store.put("manifests/000003-0000000022.json", b"damaged")
    store.put("metrics/000006-00001.jsonl", b"")
    lease = Lease.acquire(store, "job")
    assert lease.generation == 7, "a generation that left anything behind is never used again"
    assert lease.lineage == (LineageEntry(1, None), LineageEntry(4, ManifestId(1, 20)))
    (warning,) = caplog.messages
    assert "manifests/000003-0000000022.json: passed over while lease.json is rebuilt: " in warning


def test_wire_damaged_manifests_still_place_generations(store: ObjectStore) -> None:
    put_manifests(store, (1, 10, None), (4, 25, ManifestId(1, 10)))
    lease = Lease.acquire(FlippedOnce(store.uri), "job")
    assert lease.lineage == (LineageEntry(1, None), LineageEntry(4, ManifestId(1, 10)))


commits = st.builds(ManifestId, st.integers(1, 10**7), st.integers(0, 10**11))
entries = st.builds(LineageEntry, st.integers(1, 10**7), st.none() | commits)


@given(st.integers(1, 10**7), st.text(), st.text(), st.text(), st.lists(entries, max_size=5).map(tuple))
def test_lease_records_round_trip_and_notice_every_changed_byte(
    generation: int, owner: str, taken: str, nonce: str, lineage: tuple[LineageEntry, ...]
) -> None:
    record = LeaseRecord(generation, owner, taken, nonce, lineage)
    raw = record.encode()
    assert LeaseRecord.decode(raw) == record
    middle = len(raw) // 2
    with pytest.raises(DamagedRecordError):
        LeaseRecord.decode(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])


@given(st.lists(commits), st.lists(entries), st.integers(0, 10**7))
def test_whatever_lease_says_live_checkpoints_exist_newest_first(
    ids: list[ManifestId], lineage: list[LineageEntry], generation: int
) -> None:
    live = live_manifests(ids, lineage, generation)
    assert set(live) <= set(ids)
    assert live == sorted(set(live), reverse=True)
    assert all(commit.generation <= generation for commit in live)


@dataclass
class Job:
    """One generation as the history machine knows it: what it loaded, and what it may still commit."""

    generation: int
    started: bool = False
    step: int = 0
    history: list[ManifestId] = field(default_factory=list)
    """What a resume from this job's work may load, newest first."""


class Histories(RuleBasedStateMachine):
    """Jobs take the run, start, train and commit in any order; the older ones do not know yet that they lost it."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self.ids: list[ManifestId] = []
        self.lineage: list[LineageEntry] = []

    @property
    def truth(self) -> list[ManifestId]:
        started = [job for job in self.jobs if job.started]
        return started[-1].history if started else []

    def live(self) -> list[ManifestId]:
        return live_manifests(self.ids, self.lineage, len(self.jobs))

    @rule()
    def take(self) -> None:
        self.jobs.append(Job(len(self.jobs) + 1))

    @precondition(lambda self: self.jobs and not self.jobs[-1].started)
    @rule(damaged=st.integers(0, 2))
    def start(self, damaged: int) -> None:
        """The newest job loads the newest live checkpoint that verifies; `damaged` ones are passed over."""
        job, live = self.jobs[-1], self.live()
        if live and damaged >= len(live):
            return
        job.history = live[damaged:]
        parent = job.history[0] if job.history else None
        job.started, job.step = True, parent.step if parent else 0
        self.lineage.append(LineageEntry(job.generation, parent))

    @precondition(lambda self: any(job.started for job in self.jobs))
    @rule(data=st.data(), steps=st.integers(1, 3))
    def commit(self, data: st.DataObject, steps: int) -> None:
        """Any job that ever trained commits, a zombie among them: its check of the lease came before the newer job."""
        job = data.draw(st.sampled_from([job for job in self.jobs if job.started]))
        job.step += steps
        self.ids.append(ManifestId(job.generation, job.step))
        job.history = [self.ids[-1], *job.history]

    @invariant()
    def what_loads_is_the_history_of_the_newest_job_that_trained(self) -> None:
        assert self.live() == self.truth


TestHistories = Histories.TestCase
