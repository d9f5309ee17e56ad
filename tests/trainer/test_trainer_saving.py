"""A run's saves: how often, what to do when the capacity goes away, and that all ranks do it alike."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.checkpoint.saving import (
    Events,
    checkpointer,
    eventually,
    manifests_of,
    own_tensors,
    sample_tensors,
)
from tests.trainer.ranks import run_threads
from trainer.checkpoint.format.layout import MANIFESTS, ManifestId
from trainer.checkpoint.lineage.lease import Lease
from trainer.checkpoint.save.flight import SaveOutcome
from trainer.checkpoint.save.interval import Interval
from trainer.checkpoint.save.saver import Checkpointer
from trainer.checkpoint.votes import StoreVotes
from trainer.errors import LostRunError
from trainer.interrupt import Notice
from trainer.run.saving import FINAL_TRIES, NotSavedError, Saving, State, plan_for_notice
from trainer.storage import StorageError, open_store
from trainer.storage.local import LocalStore

seconds = st.floats(0, 1e4)
word = st.fixed_dictionaries(
    {"left": st.none() | seconds, "flight": st.none() | seconds, "new": seconds, "committed": st.integers(0, 9)}
)
words = st.lists(word, min_size=1, max_size=5)


def announced(notice: Mapping[str, Any]) -> None:
    """Where a test does not look at what the ranks announce."""


def said(*ranks: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return dict(enumerate(ranks))


def one(left: float | None, flight: float | None, new: float, committed: int = 0) -> dict[str, Any]:
    return {"left": left, "flight": flight, "new": new, "committed": committed}


@pytest.mark.parametrize(
    ("ranks", "do", "time_left"),
    [
        ([one(None, None, 5.0)], "save", True),
        ([one(None, 2.0, 5.0)], "finish", True),
        ([one(None, 5.0, 2.0)], "save", True),
        ([one(4.0, 2.0, 5.0)], "finish", False),
        ([one(1.0, 5.0, 2.0)], "finish", False),
        ([one(3.0, 5.0, 2.0)], "save", True),
        ([one(None, None, 5.0), one(None, 2.0, 0.0)], "finish", True),
        ([one(None, 2.0, 3.0), one(None, 5.0, 2.0)], "save", True),
        ([one(None, 5.0, 2.0), one(1.0, None, 0.0)], "finish", False),
    ],
)
def test_the_slowest_rank_and_the_nearest_end_decide(ranks: list[dict[str, Any]], do: str, time_left: bool) -> None:
    plan = plan_for_notice(said(*ranks))
    assert (plan["do"], plan["time_left"]) == (do, time_left)


@given(words)
def test_a_save_that_cannot_come_in_time_never_replaces_one_in_flight(ranks: list[dict[str, Any]]) -> None:
    plan = plan_for_notice(said(*ranks))
    left = min((rank["left"] for rank in ranks if rank["left"] is not None), default=math.inf)
    new = max(rank["new"] for rank in ranks)
    assert plan["time_left"] == (new <= left)
    if all(rank["flight"] is None for rank in ranks):
        assert plan["do"] == "save"
    elif new > left:
        assert plan["do"] == "finish"


@given(words, st.randoms())
def test_a_plan_is_of_what_all_know_whoever_says_it(ranks: list[dict[str, Any]], random: Any) -> None:
    plan = plan_for_notice(said(*ranks))
    assert plan["committed"] == min(rank["committed"] for rank in ranks)
    random.shuffle(ranks)
    assert plan_for_notice(said(*ranks)) == plan


class ScriptedCheckpointer:
    """Stands in for a Checkpointer: its saves take no time, are said to take `new_s`, and commit as `commits` says."""

    longest_s = 1.0

    def __init__(
        self,
        commits: Sequence[bool] = (),
        *,
        in_flight: int | None = None,
        remaining_s: float = 0.0,
        new_s: float = 1.0,
        lost: bool = False,
    ) -> None:
        self._commits = list(commits)
        self._flying = [] if in_flight is None else [in_flight]
        self._remaining_s, self._lost = remaining_s, lost
        self.estimate_s = new_s
        self.saved: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self._flying)

    @property
    def remaining_s(self) -> float | None:
        return self._remaining_s if self._flying else None

    def save(self, step: int, *state: object, urgent: bool = False) -> float:
        if self._lost:
            raise LostRunError("a newer job owns this run")
        self.saved.append(step)
        self._flying.append(step)
        return 0.0

    def poll(self) -> list[SaveOutcome]:
        return []

    def wait(self, timeout: float | None) -> list[SaveOutcome]:
        ended, self._flying = self._flying, []
        ends = [(step, self._commits.pop(0) if self._commits else True) for step in ended]
        return [SaveOutcome(step, committed, "scripted", self.estimate_s, 0) for step, committed in ends]


def saving_with(
    saver: Any,
    *,
    votes: StoreVotes | None = None,
    rank: int = 0,
    committed: int = 0,
    interval: Interval | None = None,
    **more: float,
) -> Saving:
    state = State(sample_tensors(rows=3), lambda: own_tensors(rank), dict, dict)
    return Saving(
        saver,
        votes or StoreVotes(HashStore(), 1),
        interval or Interval(4, 3600.0),
        state,
        rank=rank,
        fence=None,
        committed_step=committed,
        **more,
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.run.saving.FIRST_PAUSE_S", 0.0)


def notice(left_s: float | None) -> Notice:
    return Notice("spot", "terminate", None if left_s is None else time.monotonic() + left_s)


@pytest.mark.parametrize(
    ("flight", "left_s", "saved", "committed"),
    [
        ({"in_flight": 8}, None, [9], 9),
        ({"in_flight": 8}, 1000.0, [9], 9),
        ({"in_flight": 8, "new_s": 2000.0}, 1000.0, [], 8),
        ({"in_flight": 8, "commits": [False], "new_s": 2000.0}, 1000.0, [9], 9),
        ({"in_flight": 8, "remaining_s": 50.0}, None, [9], 9),
        ({"in_flight": 9}, None, [], 9),
        ({}, None, [9], 9),
        ({"in_flight": 8, "commits": [True, False]}, None, [9], 8),
    ],
)
def test_a_notice_ends_with_the_newest_state_that_time_allows(
    flight: dict[str, Any], left_s: float | None, saved: list[int], committed: int
) -> None:
    scripted = ScriptedCheckpointer(**flight)
    saving = saving_with(scripted, committed=4)
    saving.save_on_notice(9, notice(left_s), announced)
    assert scripted.saved == saved
    assert saving.committed_step == committed


@pytest.mark.parametrize("in_flight", [None, 8])
def test_a_notice_after_which_nothing_commits_is_a_failure_that_says_what_is_safe(in_flight: int | None) -> None:
    saving = saving_with(ScriptedCheckpointer([False, False], in_flight=in_flight), committed=4)
    said = r"step 9 could not be saved after spot notice \(terminate\) .* step 4 is committed"
    with pytest.raises(NotSavedError, match=said) as failed:
        saving.save_on_notice(9, notice(None), announced)
    assert failed.value.exit_code == 1


def test_every_rank_names_the_notice_that_only_one_has_and_before_the_save() -> None:
    shared, told = HashStore(), []
    scripted = [ScriptedCheckpointer() for _ in range(2)]
    savings = [saving_with(scripted[rank], votes=StoreVotes(shared, 2), rank=rank) for rank in range(2)]

    def stop(rank: int) -> None:
        def tell(named: Mapping[str, Any]) -> None:
            told.append((rank, named["source"], named["detail"], list(scripted[rank].saved)))

        savings[rank].save_on_notice(9, notice(100.0) if rank else None, tell)

    run_threads(2, stop)
    assert sorted(told) == [(rank, "spot", "terminate", []) for rank in range(2)]
    assert savings[0].noticed == savings[1].noticed


def test_a_notice_to_a_job_that_has_lost_its_run_saves_nothing() -> None:
    saving = saving_with(ScriptedCheckpointer(lost=True))
    with pytest.raises(LostRunError):
        saving.save_on_notice(9, notice(None), announced)


class LateVotes(StoreVotes):
    """A rank that hears how a save ended only once it has itself said what it knows about the notice."""

    def __init__(self, store: HashStore, world_size: int) -> None:
        super().__init__(store, world_size)
        self.asked = threading.Event()

    def post(self, topic: str, rank: int, value: dict[str, Any]) -> None:
        super().post(topic, rank, value)
        if topic.startswith("notice/"):
            self.asked.set()

    def gather(self, topic: str, timeout: float, **rest: Any) -> dict[int, dict[str, Any]]:
        if topic.endswith("/verdict"):
            self.asked.wait(timeout)
        return super().gather(topic, timeout, **rest)


@pytest.mark.slow
@pytest.mark.parametrize("left_s", [None, 0.0])
def test_ranks_act_alike_on_a_notice_though_only_one_has_heard_of_the_newest_commit(
    tmp_path: Path, left_s: float | None
) -> None:
    store = open_store(str(tmp_path / "run"))
    lease = Lease.take(store, "this test")
    lease.settle(None)
    shared = HashStore()
    boxes = [StoreVotes(shared, 2), LateVotes(shared, 2)]
    common = {"lease": lease, "world_size": 2}
    with (
        checkpointer(store, Events(), votes=boxes[0], rank=0, **common) as first,
        checkpointer(store, Events(), votes=boxes[1], rank=1, **common) as second,
    ):
        savers: list[Checkpointer] = [first, second]
        savings = [saving_with(savers[rank], votes=boxes[rank], rank=rank) for rank in range(2)]
        run_threads(2, lambda rank: savings[rank].save(4))
        eventually(lambda: not first.busy, "commit")
        run_threads(2, lambda rank: savings[rank].due(5))
        assert [saving.committed_step for saving in savings] == [4, 0]
        assert second.busy
        ends = run_threads(2, lambda rank: savings[rank].save_on_notice(5, None if rank else notice(left_s), announced))
        assert ends == [None, None]
        newest = 5 if left_s is None else 4
        assert [saving.committed_step for saving in savings] == [newest, newest]
    assert manifests_of(store)[-1] == ManifestId(1, newest)


class RefusingStore(LocalStore):
    """A folder whose first `refusals` commits fail."""

    def __init__(self, uri: str, refusals: int) -> None:
        super().__init__(uri)
        self.refusals = refusals

    def put(self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        if key.startswith(MANIFESTS) and self.refusals:
            self.refusals -= 1
            raise StorageError(f"{key}: refused")
        return super().put(key, body, if_absent=if_absent, if_match=if_match)


@pytest.mark.slow
@pytest.mark.parametrize("refusals", [0, 2, 3])
def test_the_last_state_of_a_run_is_tried_three_times(tmp_path: Path, refusals: int) -> None:
    store, events = RefusingStore(str(tmp_path / "run"), refusals), Events()
    with checkpointer(store, events) as saver:
        saving = saving_with(saver)
        if refusals < 3:
            saving.finish(9)
            assert saving.committed_step == 9
        else:
            with pytest.raises(NotSavedError, match="in 3 tries"):
                saving.finish(9)
    assert manifests_of(store) == [ManifestId(1, 9)][: refusals < 3]
    assert len(events.of("checkpoint_failed")) == refusals


@pytest.mark.parametrize(("in_flight", "tries"), [(None, 3), (8, 3), (9, 4)])
def test_a_last_state_that_cannot_be_saved_says_how_often_it_was_tried(in_flight: int | None, tries: int) -> None:
    saving = saving_with(ScriptedCheckpointer([False] * 9, in_flight=in_flight), committed=4)
    with pytest.raises(NotSavedError, match=f"step 9 could not be saved in {tries} tries"):
        saving.finish(9)


def test_a_state_that_is_committed_already_is_not_saved_again() -> None:
    scripted = ScriptedCheckpointer(in_flight=9)
    saving_with(scripted, committed=4).finish(9)
    saving_with(scripted, committed=9).finish(9)
    assert scripted.saved == []


positive = st.floats(1e-3, 1e3)


@given(step_s=positive, stall_s=positive, save_s=positive, least_s=st.floats(0, 1e4), mtbf_s=st.floats(1, 1e6))
def test_a_derived_interval_leaves_the_store_in_peace(
    step_s: float, stall_s: float, save_s: float, least_s: float, mtbf_s: float
) -> None:
    interval = Interval(0, mtbf_s, least_s=least_s)
    interval.measured_step(step_s)
    interval.measured_stall(stall_s)
    interval.measured_save(1e5)
    interval.measured_save(save_s)
    # Steps are whole: the interval may be half a step short.
    between_s = (interval.steps + 0.5001) * step_s
    assert between_s >= least_s
    assert between_s >= 3 * save_s


@pytest.mark.parametrize(("save_s", "wait"), [(10.0, 30), (2.0, 20)])
def test_saves_are_measured_from_call_to_commit_and_the_next_one_waits_for_it(save_s: float, wait: int) -> None:
    interval = Interval(0, 1.0, least_s=20.0)
    saving = saving_with(ScriptedCheckpointer(new_s=save_s), interval=interval)
    for _ in range(50):
        saving.note_step(1.0)
    saving.finish(100)
    assert next(step for step in range(101, 150) if saving.due(step)) == 100 + wait


def test_a_run_whose_saves_fail_for_too_long_ends_and_one_that_saves_again_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saving = saving_with(ScriptedCheckpointer(commits=[False] * FINAL_TRIES), committed=4, longest_failing_s=600.0)
    with pytest.raises(NotSavedError):
        saving.finish(8)
    now[0] = 690.0
    assert saving.overdue() is None
    now[0] = 700.0
    notice = saving.overdue()
    assert notice is not None
    assert notice.summary == "every save has failed for 10 minutes"
    saving.finish(16)
    assert saving.overdue() is None


def test_only_rank_0_asks_for_saves_and_none_while_one_is_in_flight() -> None:
    assert saving_with(ScriptedCheckpointer()).due(4)
    assert not saving_with(ScriptedCheckpointer(), rank=1).due(4)
    assert not saving_with(ScriptedCheckpointer(in_flight=3)).due(4)
