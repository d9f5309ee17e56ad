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
from tests.checkpoint.stores import AWAY, Asking, away
from tests.checkpoint.written import manifests_of, sample_state, split_state, write_checkpoint
from tests.lab.faulty_proxy import Answer, Fault, FaultyProxy, Reset
from tests.trainer.ranks import run_threads
from tests.trainer.simulated_ranks import SimulatedVotes, simulate
from trainer.checkpoint.format.layout import LEASE, ManifestId
from trainer.checkpoint.lineage.history import read_history
from trainer.checkpoint.lineage.lease import Lease, read_lease
from trainer.config import Config
from trainer.errors import EXIT_CONFIG, EXIT_LOST_RUN
from trainer.parallel import World
from trainer.parallel.agree import gather_and_decide, run_on_all_ranks
from trainer.parallel.peers import rank_0_last
from trainer.parallel.votes import RankGoneError, StoreVotes, VoteTimeout
from trainer.run.start import RunLease, claim_run, load_claimed, open_and_compare_data, require_alike
from trainer.storage import ObjectStore, open_store
from trainer.tasks import make_task

PATIENCE_S = 300.0


class Failed(UserError):
    exit_code = 1


class CountedVotes(StoreVotes):
    """Counts the words that one rank gathers."""

    heard = 0

    def gather(self, topic: str, timeout: float, **how: Any) -> dict[int, dict[str, Any]]:
        posts = super().gather(topic, timeout, **how)
        self.heard += len(posts)
        return posts


def on_ranks(work: Callable[[int, CountedVotes], Any], world_size: int = 2) -> tuple[list[Any], list[CountedVotes]]:
    """Each rank's result or exception, every rank a thread, and the ranks' ends of the votes."""
    store = HashStore()
    boxes = [CountedVotes(store, world_size) for _ in range(world_size)]
    return run_threads(world_size, lambda rank: work(rank, boxes[rank])), boxes


@pytest.mark.parametrize("ask", ["gather_and_decide", "run_on_all_ranks"])
def test_only_rank_0_reads_what_all_say_and_all_hear_the_result(ask: str) -> None:
    def reduce(said: dict[int, Any]) -> Any:
        return {"words": [one["word"] for _, one in sorted(said.items())]}

    def work(rank: int, votes: CountedVotes) -> Any:
        if ask == "gather_and_decide":
            return gather_and_decide(votes, rank, "topic", {"word": rank}, reduce, PATIENCE_S)
        return run_on_all_ranks(votes, rank, "topic", lambda: {"word": rank}, reduce)

    said, boxes = on_ranks(work, 8)
    assert said == [{"words": list(range(8))}] * 8
    assert [box.heard for box in boxes] == [9, *[1] * 7], "the ranks' words and the outcome; the outcome alone"


def test_refusal_of_reduce_reaches_all_with_its_lines_and_code() -> None:
    def reduce(said: dict[int, Any]) -> Any:
        raise Failed(["one: wrong", "two: wrong"])

    errors, _ = on_ranks(lambda rank, votes: gather_and_decide(votes, rank, "topic", {}, reduce, PATIENCE_S), 3)
    assert [type(error) for error in errors[1:]] == [UserError] * 2
    assert [(error.problems, error.exit_code) for error in errors] == [(["one: wrong", "two: wrong"], 1)] * 3


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (Failed, 1)])
def test_mistake_on_one_rank_is_raised_on_all_with_its_exit_code(kind: type[UserError], code: int) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        def mine() -> None:
            if rank == 1:
                raise kind("x = 1: wrong; fix: 2")

        return run_on_all_ranks(votes, rank, "topic", mine)

    errors, _ = on_ranks(work, 3)
    assert [(error.problems, error.exit_code) for error in errors] == [(["x = 1: wrong; fix: 2"], code)] * 3


def test_the_same_mistake_on_all_ranks_is_one_line() -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        def mine() -> None:
            raise UserError(["x = 1: wrong", f"rank {rank}: no disk"], 1 + rank)

        return run_on_all_ranks(votes, rank, "topic", mine)

    errors, _ = on_ranks(work)
    assert [error.problems for error in errors] == [["x = 1: wrong", "rank 0: no disk", "rank 1: no disk"]] * 2
    assert [error.exit_code for error in errors] == [2, 2], "a mistake counts before a failure"


@pytest.mark.parametrize("broken", [0, 1])
def test_defect_on_one_rank_is_a_line_on_the_others(broken: int) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        def mine() -> None:
            if rank == broken:
                raise KeyError("width")

        return run_on_all_ranks(votes, rank, "topic", mine)

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


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("rank_0", [True, False])
def test_interrupted_rank_leaves_at_once_and_the_others_end(kind: type[BaseException], rank_0: bool) -> None:
    interrupted, left = 0 if rank_0 else 1, threading.Event()

    def mine(rank: int) -> None:
        if rank == interrupted:
            raise kind
        assert left.wait(PATIENCE_S), "it waits for the others"

    def work(rank: int, votes: CountedVotes) -> Any:
        try:
            return run_on_all_ranks(votes, rank, "topic", lambda: mine(rank))
        except kind as error:
            left.set()
            return error

    ends, _ = on_ranks(work, 3)
    assert type(ends[interrupted]) is kind
    others = [error for rank, error in enumerate(ends) if rank != interrupted]
    line = f"rank {interrupted}: {kind.__name__}"
    assert [(error.problems, error.exit_code) for error in others] == [([line], 1)] * 2


def test_defect_of_reduce_is_a_line_on_the_others() -> None:
    def reduce(said: dict[int, Any]) -> Any:
        raise KeyError("width")

    errors, _ = on_ranks(lambda rank, votes: gather_and_decide(votes, rank, "topic", {}, reduce, PATIENCE_S), 3)
    assert type(errors[0]) is KeyError
    assert [(error.problems, error.exit_code) for error in errors[1:]] == [(["rank 0: KeyError: 'width'"], 1)] * 2


def test_result_that_json_cannot_hold_is_a_line_on_the_others() -> None:
    results = [{}, {"x": object()}]
    errors, _ = on_ranks(lambda rank, votes: run_on_all_ranks(votes, rank, "topic", lambda: results[rank]))
    assert type(errors[1]) is TypeError
    assert [line.partition("TypeError")[0] for line in errors[0].problems] == ["rank 1: "]


def test_silent_rank_is_named_on_every_rank_that_waits() -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        return gather_and_decide(votes, rank, "topic", {}, lambda said: {}, 0.1) if rank < 2 else None

    errors, _ = on_ranks(work, 3)
    assert [(type(error), error.missing) for error in errors[:2]] == [(VoteTimeout, [2])] * 2


@pytest.mark.parametrize("gone", [0, 2])
def test_rank_that_fails_between_decisions_ends_the_others(gone: int) -> None:
    def work(rank: int, votes: CountedVotes) -> None:
        with rank_0_last(world_of(rank, 3), votes):
            if rank == gone:
                raise MemoryError("8 GiB")
            run_on_all_ranks(votes, rank, "topic", dict)

    errors, _ = on_ranks(work, 3)
    assert type(errors.pop(gone)) is MemoryError
    assert [(type(error), error.reasons) for error in errors] == [(RankGoneError, {gone: "MemoryError: 8 GiB"})] * 2


@pytest.mark.parametrize("kind", [KeyError, UserError])
def test_own_failure_counts_before_a_rank_that_is_gone(kind: type[Exception]) -> None:
    def work(rank: int, votes: CountedVotes) -> None:
        def mine() -> None:
            raise kind("width")

        if rank == 2:
            votes.withdraw(rank, "MemoryError")
        else:
            run_on_all_ranks(votes, rank, "topic", mine if rank else dict)

    errors, _ = on_ranks(work, 3)
    assert [type(error) for error in errors[:2]] == [RankGoneError, kind]


@pytest.mark.parametrize("where", ["work", "reduce"])
def test_rank_0_stays_until_the_others_know_why_it_ends(where: str) -> None:
    left, ends = threading.Event(), []

    class LateVotes(StoreVotes):
        def gather(self, topic: str, timeout: float, **how: Any) -> dict[int, dict[str, Any]]:
            posts = super().gather(topic, timeout, **how)
            if topic.endswith("/outcome") and "problems" in posts[0]:
                ends.append("gone" if left.wait(0.2) else "here")
            return posts

    def fail(*answers: object) -> Any:
        raise KeyError("width")

    def work(rank: int) -> None:
        votes = LateVotes(shared, 2) if rank else StoreVotes(shared, 2)
        try:
            run_on_all_ranks(votes, rank, "topic", fail if (where, rank) == ("work", 0) else dict, fail)
        finally:
            if rank == 0:
                left.set()

    shared = HashStore()
    errors = run_threads(2, work)
    assert [type(error) for error in errors] == [KeyError, UserError]
    assert ends == ["here"]


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


def world_of(rank: int, world_size: int) -> World:
    return World(rank, world_size, rank, torch.device("cpu"), HashStore())


def claim(config: Config, store: ObjectStore, world_size: int) -> list[Any]:
    """What each rank gets that claims the run: a RunLease, or an error."""

    def work(rank: int, votes: CountedVotes) -> Any:
        task = make_task(config.task, seed=1)
        task.open(Path())
        return claim_run(config, task, world_of(rank, world_size), votes, store)

    return on_ranks(work, world_size)[0]


def load(config: Config, store: ObjectStore, lease: Lease, *candidates: ManifestId) -> list[Any]:
    """What each of two ranks gets that loads from a run which it has claimed."""

    def work(rank: int, votes: CountedVotes) -> Any:
        claim = RunLease(lease.generation, list(candidates), 8, {}, lease if rank == 0 else None)
        return load_claimed(
            config,
            world_of(rank, 2),
            votes,
            store,
            claim,
            lambda checkpoint: checkpoint.read(lambda name: True),
            lambda *event: None,
        )

    return on_ranks(work)[0]


def test_ranks_that_opened_other_data_all_refuse_to_start(tmp_path: Path) -> None:
    def work(rank: int, votes: CountedVotes) -> Any:
        config = tiny_config(tmp_path / "run", (64, 65, 64)[rank])
        return open_and_compare_data(config, make_task(config.task, seed=1), world_of(rank, 3), votes)

    said, _ = on_ranks(work, 3)
    line = "task on rank 1: differs from rank 0 in data.samples, data.sum; fix: give every node the same data"
    assert [error.problems for error in said] == [[line]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code"),
    [(Answer(503), 1), (Reset(), 1), (Answer(403, "AccessDenied"), 2)],
    ids=["busy", "gone", "refused"],
)
def test_store_failing_at_lease_is_a_failure_refusing_a_mistake(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, code: int
) -> None:
    """By these codes a launcher starts the job again, or asks a person."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    # Nothing is behind the proxy: a store opens also where a policy forbids to list it.
    with FaultyProxy("http://127.0.0.1:9") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.inject(Answer(403, "AccessDenied"), key="list-type")
        store = open_store("s3://bucket/run")
        proxy.inject(fault)
        errors = claim(tiny_config("s3://bucket/run"), store, 2)
    assert [(error.exit_code, len(error.problems)) for error in errors] == [(code, 1)] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_job_before_commits_until_the_takeover_is_not_lost(tmp_path: Path, world_size: int) -> None:
    config = tiny_config(tmp_path / "run")
    store: ObjectStore = open_store(config.run.uri)
    before = Lease.acquire(store, "the job before")
    before.record_parent(None)
    early, late = ManifestId(1, 10), ManifestId(1, 20)
    store.put(early.key, b"a manifest")

    def commit_late(request: str, key: str) -> None:
        if (request, key) == ("replace", LEASE) and late not in manifests_of(store):
            before.check()
            store.put(late.key, b"a manifest")

    claims = claim(config, Asking(config.run.uri, commit_late), world_size)
    assert [claim.candidates for claim in claims] == [[late, early]] * world_size
    assert [claim.generation for claim in claims] == [2] * world_size
    claims[0].lease.record_parent(claims[0].candidates[0])
    history = read_history(store)
    assert (history.live, history.dead) == ([late, early], [])


@pytest.mark.parametrize(("overtaken", "code"), [(True, EXIT_LOST_RUN), (False, EXIT_CONFIG)])
def test_checkpoints_pruned_by_newer_job_are_lost_run_no_damage(tmp_path: Path, overtaken: bool, code: int) -> None:
    config = tiny_config(tmp_path / "run")
    store = open_store(config.run.uri)
    lease = Lease.acquire(store, "this job")
    if overtaken:
        Lease.acquire(store, "the newer job")
    errors = load(config, store, lease, ManifestId(1, 20), ManifestId(1, 10))
    assert [error.exit_code for error in errors] == [code] * 2
    assert all(("the newer job owns this run" in str(error)) == overtaken for error in errors)
    assert all(("none verifies" in str(error)) != overtaken for error in errors)


def test_store_that_fails_at_the_owners_check_is_a_failure(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")
    Lease.acquire(open_store(config.run.uri), "this job")
    record, silent = read_lease(open_store(config.run.uri)), away(config.run.uri, "read", LEASE)
    assert record is not None
    errors = load(config, silent, Lease(silent, record, ""), ManifestId(1, 20))
    assert [(error.exit_code, AWAY in str(error)) for error in errors] == [(1, True)] * 2


@pytest.mark.slow
def test_start_and_load_take_a_few_round_trips_per_rank(tmp_path: Path) -> None:
    ranks, decisions = 256, 5
    config = tiny_config(tmp_path / "run")
    store = open_store(config.run.uri)
    before = Lease.acquire(store, "the job before")
    before.record_parent(None)
    damaged, whole = ManifestId(1, 20), write_checkpoint(store, 10, split_state(sample_state(1), 1)).id
    store.put(damaged.key, b"not a manifest")

    def start(rank: int, votes: SimulatedVotes) -> Any:
        world, task = world_of(rank, ranks), make_task(config.task, seed=1)
        open_and_compare_data(config, task, world, votes)
        claim = claim_run(config, task, world, votes, store)
        assert claim.candidates == [damaged, whole]
        return load_claimed(
            config,
            world,
            votes,
            store,
            claim,
            lambda checkpoint: checkpoint.read(lambda name: False),
            lambda *event: None,
        )

    loaded, round_trips = simulate(ranks, start)
    assert [end.manifest.id for end in loaded] == [whole] * ranks
    assert sum(round_trips) <= 20 * decisions * ranks
    assert max(round_trips[1:]) <= 20 * decisions


def test_a_newer_job_that_stores_its_settings_first_owns_the_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")
    store = open_store(config.run.uri)

    def be_replaced(request: str, key: str) -> None:
        if key == "config.toml" and request == "put":
            Lease.acquire(store, "the newer job")
            store.put(key, b"# other settings\n")

    (error,) = claim(config, Asking(config.run.uri, be_replaced), 1)
    assert error.exit_code == EXIT_LOST_RUN
