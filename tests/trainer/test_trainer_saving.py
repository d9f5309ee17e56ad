"""A run's saves: how often, what to do when the capacity goes away, and that all ranks do it alike."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.checkpoint.saving import sample_tensors
from tests.trainer.ranks import run_threads
from trainer.checkpoint.save.flight import FinishedSave
from trainer.checkpoint.save.interval import Interval
from trainer.errors import LostRunError
from trainer.interrupt import Notice
from trainer.parallel.votes import StoreVotes
from trainer.run.saving import FINAL_TRIES, NotSavedError, Saving, State, plan_for_notice


def announced(notice: Mapping[str, Any]) -> None:
    """Where a test does not look at what the ranks announce."""


def one(left: float | None, flight: float | None, new: float, committed: int = 0) -> dict[str, Any]:
    return {"left": left, "flight": flight, "new": new, "committed": committed}


@pytest.mark.parametrize(
    ("ranks", "do", "time_left"),
    [
        ([one(None, None, 5.0)], "save", True),
        ([one(1.0, None, 2.0)], "save", False),
        ([one(None, 2.0, 5.0)], "finish", True),
        ([one(None, 5.0, 5.0)], "finish", True),
        ([one(None, 5.0, 2.0)], "save", True),
        ([one(4.0, 2.0, 5.0)], "finish", False),
        ([one(1.0, 5.0, 2.0)], "finish", False),
        ([one(3.0, 5.0, 2.0)], "save", True),
        ([one(2.0, 5.0, 2.0)], "save", True),
        ([one(None, None, 5.0), one(None, 2.0, 0.0)], "finish", True),
        ([one(None, 2.0, 3.0), one(None, 5.0, 2.0)], "save", True),
        ([one(None, 5.0, 2.0), one(1.0, None, 0.0)], "finish", False),
        ([one(1.0, 5.0, 2.0), one(9.0, None, 0.0)], "finish", False),
        ([one(9.0, 5.0, 2.0), one(1.0, None, 0.0)], "finish", False),
    ],
)
def test_the_slowest_rank_and_the_nearest_end_decide(ranks: list[dict[str, Any]], do: str, time_left: bool) -> None:
    plan = plan_for_notice(dict(enumerate(ranks)))
    assert (plan["do"], plan["time_left"]) == (do, time_left)


def test_committed_is_what_all_ranks_know_of() -> None:
    steps = (8, 4, 6)
    assert plan_for_notice({rank: one(None, None, 1.0, step) for rank, step in enumerate(steps)})["committed"] == 4


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

    def poll(self) -> list[FinishedSave]:
        return []

    def wait(self, timeout: float | None) -> list[FinishedSave]:
        ended, self._flying = self._flying, []
        ends = [(step, self._commits.pop(0) if self._commits else True) for step in ended]
        return [FinishedSave(step, committed, "scripted", self.estimate_s, 0) for step, committed in ends]


def saving_with(
    saver: Any,
    *,
    votes: StoreVotes | None = None,
    rank: int = 0,
    committed: int = 0,
    interval: Interval | None = None,
    **more: float,
) -> Saving:
    state = State(sample_tensors(rows=3), dict, dict)
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
        ({"new_s": 2000.0}, 1000.0, [9], 9),
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
def test_notice_without_a_commit_is_a_failure_with_what_is_safe(in_flight: int | None) -> None:
    saving = saving_with(ScriptedCheckpointer([False, False], in_flight=in_flight), committed=4)
    said = r"step 9 could not be saved after spot notice \(terminate\) .* step 4 is committed"
    with pytest.raises(NotSavedError, match=said) as failed:
        saving.save_on_notice(9, notice(None), announced)
    assert failed.value.exit_code == 1


def test_every_rank_names_the_one_ranks_notice_before_the_save() -> None:
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


@pytest.mark.parametrize(("left_s", "newest"), [(None, 9), (0.0, 8)])
def test_ranks_act_alike_on_a_notice_though_one_missed_a_commit(left_s: float | None, newest: int) -> None:
    shared, savers = HashStore(), [ScriptedCheckpointer(), ScriptedCheckpointer(in_flight=8)]
    savings = [
        saving_with(savers[rank], votes=StoreVotes(shared, 2), rank=rank, committed=known)
        for rank, known in enumerate((8, 4))
    ]
    ends = run_threads(2, lambda rank: savings[rank].save_on_notice(9, None if rank else notice(left_s), announced))
    assert ends == [None, None]
    assert [saving.committed_step for saving in savings] == [newest] * 2
    assert [saver.saved for saver in savers] == [[9] * (newest == 9)] * 2


@pytest.mark.parametrize(
    ("in_flight", "fail", "tries"), [(None, 0, 1), (None, 2, 3), (None, 9, 3), (8, 9, 3), (9, 9, 4)]
)
def test_the_last_state_of_a_run_is_tried_three_times(in_flight: int | None, fail: int, tries: int) -> None:
    scripted = ScriptedCheckpointer([False] * fail, in_flight=in_flight)
    saving = saving_with(scripted, committed=4)
    if fail < FINAL_TRIES:
        saving.finish(9)
        assert (saving.committed_step, scripted.saved) == (9, [9] * tries)
    else:
        with pytest.raises(NotSavedError, match=f"step 9 could not be saved in {tries} tries"):
            saving.finish(9)
        assert (saving.committed_step, scripted.saved) == (4, [9] * FINAL_TRIES)


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
def test_saves_are_measured_from_call_to_commit_and_next_waits(save_s: float, wait: int) -> None:
    interval = Interval(0, 1.0, least_s=20.0)
    saving = saving_with(ScriptedCheckpointer(new_s=save_s), interval=interval)
    for _ in range(50):
        saving.note_step(1.0)
    saving.finish(100)
    assert next(step for step in range(101, 150) if saving.should_save(step)) == 100 + wait


def test_run_whose_saves_fail_ends_one_that_saves_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saving = saving_with(ScriptedCheckpointer(commits=[False] * FINAL_TRIES), committed=4, longest_failing_s=600.0)
    with pytest.raises(NotSavedError):
        saving.finish(8)
    now[0] = 690.0
    assert saving.unsaved_too_long() is None
    now[0] = 700.0
    notice = saving.unsaved_too_long()
    assert notice is not None
    assert notice.summary == "every save has failed for 10 minutes"
    saving.finish(16)
    assert saving.unsaved_too_long() is None


def test_only_rank_0_requests_saves_and_one_at_a_time() -> None:
    assert saving_with(ScriptedCheckpointer()).should_save(4)
    assert not saving_with(ScriptedCheckpointer(), rank=1).should_save(4)
    assert not saving_with(ScriptedCheckpointer(in_flight=3)).should_save(4)
