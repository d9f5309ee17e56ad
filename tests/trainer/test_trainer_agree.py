"""Ranks that decide together: all hear the same, a mistake anywhere stops all, and nobody waits for a rank that leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lustrain.problem import UserError
from tests.lab.faulty_proxy import Answer, Fault, FaultyProxy, Reset
from tests.trainer.ranks import run_threads
from trainer.checkpoint.format.layout import LEASE, MANIFESTS, ManifestId
from trainer.checkpoint.lineage.history import read_history
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.load.latest import load_latest
from trainer.checkpoint.votes import StoreVotes
from trainer.config import Config, TaskConfig
from trainer.errors import EXIT_CONFIG, EXIT_LOST_RUN
from trainer.parallel import World
from trainer.parallel.agree import decide, together
from trainer.run.start import Claim, claim_run, load_claimed, open_data_alike, require_alike
from trainer.storage import ObjectInfo, ObjectStore, StorageError, open_store
from trainer.storage.local import LocalStore
from trainer.tasks import Task, make_task

PATIENCE_S = 300.0


class Failed(UserError):
    exit_code = 1


class CountedVotes(StoreVotes):
    """Counts the words that one rank reads."""

    def __init__(self, store: HashStore, world_size: int) -> None:
        super().__init__(store, world_size)
        self.heard = 0

    def _read_posts(self, topic: str, known: int, posts: dict[int, dict[str, Any]]) -> int:
        before = len(posts)
        known = super()._read_posts(topic, known, posts)
        self.heard += len(posts) - before
        return known


def on_ranks(work: Callable[[int, CountedVotes], Any], world_size: int = 2) -> tuple[list[Any], list[CountedVotes]]:
    """Each rank's result or exception, every rank a thread, and the ranks' ends of the votes."""
    store = HashStore()
    boxes = [CountedVotes(store, world_size) for _ in range(world_size)]
    return run_threads(world_size, lambda rank: work(rank, boxes[rank])), boxes


def test_all_hear_what_rank_0_made_of_every_word() -> None:
    def judge(said: dict[int, Any]) -> Any:
        return {"most": max(one["word"] for one in said.values()), "of": sorted(said)}

    said, _ = on_ranks(lambda rank, votes: decide(votes, rank, "topic", {"word": rank * 10}, judge, PATIENCE_S), 4)
    assert said == [{"most": 30, "of": [0, 1, 2, 3]}] * 4


@pytest.mark.parametrize("ask", ["decide", "together"])
def test_only_rank_0_reads_what_all_say(ask: str) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        if ask == "decide":
            return decide(votes, rank, "topic", {"word": rank}, lambda said: {"words": len(said)}, PATIENCE_S)
        return together(votes, rank, "topic", lambda: {"word": rank}, lambda said: {"words": len(said)})

    said, boxes = on_ranks(work, 8)
    assert said == [{"words": 8}] * 8
    assert [box.heard for box in boxes] == [9, *[1] * 7], "the ranks' words and the outcome; the outcome alone"


def test_a_refusal_of_the_judge_reaches_all_with_its_lines_and_exit_code() -> None:
    def judge(said: dict[int, Any]) -> Any:
        raise Failed(["one: wrong", "two: wrong"])

    errors, _ = on_ranks(lambda rank, votes: decide(votes, rank, "topic", {}, judge, PATIENCE_S), 3)
    assert [type(error) for error in errors[1:]] == [UserError] * 2
    assert [(error.problems, error.exit_code) for error in errors] == [(["one: wrong", "two: wrong"], 1)] * 3


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (Failed, 1)])
def test_a_mistake_on_one_rank_is_raised_on_all_with_its_exit_code(kind: type[UserError], code: int) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        def mine() -> None:
            if rank == 1:
                raise kind("x = 1: wrong; fix: 2")

        return together(votes, rank, "topic", mine)

    errors, _ = on_ranks(work, 3)
    assert [(error.problems, error.exit_code) for error in errors] == [(["x = 1: wrong; fix: 2"], code)] * 3


def test_the_same_mistake_on_all_ranks_is_one_line() -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        def mine() -> None:
            raise UserError(["x = 1: wrong", f"rank {rank}: no disk"])

        return together(votes, rank, "topic", mine)

    errors, _ = on_ranks(work)
    assert [error.problems for error in errors] == [["x = 1: wrong", "rank 0: no disk", "rank 1: no disk"]] * 2


@pytest.mark.parametrize("broken", [0, 1])
def test_a_defect_on_one_rank_is_a_line_on_the_others_and_keeps_its_trace_at_home(broken: int) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        def mine() -> None:
            if rank == broken:
                raise KeyError("width")

        return together(votes, rank, "topic", mine)

    errors, _ = on_ranks(work)
    at_home, other = errors[broken], errors[1 - broken]
    assert type(at_home) is KeyError
    names = []
    trace = at_home.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[-1] == "mine"
    assert (other.problems, other.exit_code) == ([f"rank {broken}: KeyError: 'width'"], 1)


class AwayStore(LocalStore):
    def read(self, key: str) -> tuple[bytes, str]:
        raise StorageError(f"{key}: does not answer; fix: wait")


def test_a_store_that_one_rank_cannot_read_is_a_storage_error_on_all(tmp_path: Path) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        store = (AwayStore if rank == 1 else LocalStore)(str(tmp_path))
        common = {"candidates": [ManifestId(1, 8)], "want": lambda name: True, "on_event": lambda kind, fields: None}
        return load_latest(store, votes, rank=rank, world_size=2, **common)

    errors, _ = on_ranks(work)
    assert [type(error) for error in errors] == [StorageError] * 2
    assert all("does not answer; fix: wait" in str(error) for error in errors)


def test_data_that_differ_are_named_by_rank_and_by_what_differs() -> None:
    same = {"model": {"width": 8}, "data": {"checksum": "a", "tokens": 5}}
    other = {"model": {"width": 8}, "data": {"checksum": "b", "tokens": 6}}
    assert require_alike(dict.fromkeys(range(5), same)) == {}
    with pytest.raises(UserError) as refused:
        require_alike({0: same, 1: other, 2: same, 3: {"model": {"width": 8}}})
    first, second = refused.value.problems
    assert first.startswith("task on rank 1: differs from rank 0 in data.checksum, data.tokens; fix: ")
    assert second.startswith("task on rank 3: differs from rank 0 in data.checksum, data.tokens; fix: ")
    with pytest.raises(UserError) as many:
        require_alike({0: same, **dict.fromkeys(range(1, 1000), other)})
    assert len(many.value.problems) == 8


def tiny_config(uri: Path | str, samples: int = 64) -> Config:
    return Config.model_validate(
        {
            "run": {"uri": str(uri)},
            "task": {"name": "tests.trainer.tiny_task:Tiny", "samples": samples},
            "train": {"steps": 8, "global_batch": 4, "micro_batch": 2},
        }
    )


def tiny_task(config: TaskConfig) -> Task:
    return make_task(config, seed=1)


def world_of(rank: int, world_size: int) -> World:
    return World(rank, world_size, rank, torch.device("cpu"), HashStore())


@pytest.mark.parametrize(("samples", "alike"), [((64, 64, 64), True), ((64, 65, 64), False)])
def test_ranks_that_opened_other_data_all_refuse_to_start(
    tmp_path: Path, samples: tuple[int, ...], alike: bool
) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        config = tiny_config(tmp_path / "run", samples[rank])
        return open_data_alike(config, tiny_task(config.task), world_of(rank, 3), votes)

    said, _ = on_ranks(work, 3)
    if alike:
        assert said == [None] * 3
    else:
        line = "task on rank 1: differs from rank 0 in data.samples, data.sum; fix: give every node the same data"
        assert [error.problems for error in said] == [[line]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code"),
    [(Answer(503), 1), (Reset(), 1), (Answer(403, "AccessDenied"), 2)],
    ids=["busy", "gone", "refused"],
)
def test_a_store_that_fails_while_the_run_is_claimed_is_a_failure_and_one_that_refuses_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, code: int
) -> None:
    """By these codes a launcher starts the job again, or asks a person."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    def work(rank: int, votes: CountedVotes) -> Any:
        config = tiny_config("s3://bucket/run")
        task = tiny_task(config.task)
        task.open(tmp_path)
        return claim_run(config, task, world_of(rank, 2), votes, open_store(config.run.uri))

    # Nothing is behind the proxy: a store opens also where a policy forbids to list it.
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.inject(Answer(403, "AccessDenied"), key="list-type")
        proxy.inject(fault)
        errors, _ = on_ranks(work)
    assert [(error.exit_code, len(error.problems)) for error in errors] == [(code, 1)] * 2


class OvertakenStore(LocalStore):
    """A run whose owner commits once more just after somebody else has first looked what there is."""

    def __init__(self, uri: str, owner: Lease, late: ManifestId) -> None:
        super().__init__(uri)
        self._owner, self._late = owner, late
        self._first = threading.Lock()

    def list(self, prefix: str = "") -> Any:
        found: list[ObjectInfo] = list(super().list(prefix))
        if prefix == MANIFESTS and self._first.acquire(blocking=False):
            self._owner.check()
            self.put(self._late.key, b"a manifest")
        return iter(found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_the_job_before_commits_until_the_run_is_taken_is_not_lost(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(tmp_path / "run")
    store: ObjectStore = open_store(config.run.uri)
    before = Lease.take(store, "the job before")
    before.settle(None)
    early, late = ManifestId(1, 10), ManifestId(1, 20)
    store.put(early.key, b"a manifest")
    overtaken = OvertakenStore(config.run.uri, before, late)

    def work(rank: int, votes: CountedVotes) -> Any:
        task = tiny_task(config.task)
        task.open(tmp_path)
        return claim_run(config, task, world_of(rank, world_size), votes, overtaken)

    claims, _ = on_ranks(work, world_size)
    assert [claim.candidates for claim in claims] == [[late, early]] * world_size
    assert [claim.generation for claim in claims] == [2] * world_size
    claims[0].lease.settle(claims[0].candidates[0])
    history = read_history(store)
    assert (history.live, history.dead) == ([late, early], [])


@pytest.mark.parametrize(("overtaken", "code"), [(True, EXIT_LOST_RUN), (False, EXIT_CONFIG)])
def test_checkpoints_that_a_newer_job_pruned_while_this_one_read_them_are_a_lost_run_and_no_damage(
    tmp_path: Path, overtaken: bool, code: int
) -> None:
    config = tiny_config(tmp_path / "run")
    store = open_store(config.run.uri)
    candidates = [ManifestId(1, 20), ManifestId(1, 10)]
    lease = Lease.take(store, "this job")
    if overtaken:
        Lease.take(store, "the newer job")

    def work(rank: int, votes: CountedVotes) -> Any:
        claim = Claim(lease.generation, candidates, 8, {}, lease if rank == 0 else None)
        return load_claimed(config, world_of(rank, 2), votes, store, claim, lambda name: True, lambda *event: None)

    errors, _ = on_ranks(work)
    assert [error.exit_code for error in errors] == [code] * 2
    assert all(("the newer job owns this run" in str(error)) == overtaken for error in errors)
    assert all(("none verifies" in str(error)) != overtaken for error in errors)


class SilentOwnerStore(LocalStore):
    """Answers nothing to the question who owns the run, once that is set."""

    silent = False

    def read(self, key: str) -> tuple[bytes, str]:
        if self.silent and key == LEASE:
            raise StorageError(f"{key}: does not answer; fix: wait")
        return super().read(key)


def test_a_store_that_fails_when_asked_who_owns_the_run_is_a_failure_and_no_mistake(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")
    store = SilentOwnerStore(config.run.uri)
    lease = Lease.take(store, "this job")
    store.silent = True

    def work(rank: int, votes: CountedVotes) -> Any:
        claim = Claim(lease.generation, [ManifestId(1, 20)], 8, {}, lease if rank == 0 else None)
        return load_claimed(config, world_of(rank, 2), votes, store, claim, lambda name: True, lambda *event: None)

    errors, _ = on_ranks(work)
    assert [(error.exit_code, "does not answer" in str(error)) for error in errors] == [(1, True)] * 2


class ReplacedStore(LocalStore):
    """A run that a newer job takes and records its settings in, just before this one records its own."""

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        if key == "config.toml":
            Lease.take(open_store(self.uri), "the newer job")
            super().put(key, body + b"# other settings\n")
        return super().put(key, body, if_absent=if_absent, if_match=if_match)


def test_a_newer_job_that_stores_its_settings_first_owns_the_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")

    def work(rank: int, votes: CountedVotes) -> Any:
        task = tiny_task(config.task)
        task.open(tmp_path)
        return claim_run(config, task, world_of(rank, 1), votes, ReplacedStore(config.run.uri))

    (error,), _ = on_ranks(work, 1)
    assert error.exit_code == EXIT_LOST_RUN
