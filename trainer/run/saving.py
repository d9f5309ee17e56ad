"""Saves of a run, between the loop and the checkpoints: what, when, and what to do when the capacity goes away.

Every decision is taken alike on all ranks: from the step's exchange, or from votes that all of them read.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lustrain.backoff import pause_s
from lustrain.problem import UserError
from trainer.checkpoint.lineage.fence import Fence
from trainer.checkpoint.save.interval import Interval, choose_on_notice
from trainer.checkpoint.save.saver import Checkpointer
from trainer.errors import LostRunError
from trainer.interrupt.notice import Notice, to_announce
from trainer.parallel.agree import Json, gather_and_decide, run_on_all_ranks
from trainer.parallel.votes import VoteBox

FINAL_TRIES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20.0, 60.0
"""The last state of a run is worth more than one try, and a store that is away for a moment gets one: nothing comes after."""
NOTICE_VOTE_S = 60.0
"""Ranks reach the same step boundary within one step of each other; a rank that is silent for longer is gone."""


class NotSavedError(UserError):
    """The attempt ended without its last state in the store; the checkpoint before it is intact."""

    exit_code = 1


@dataclass(frozen=True)
class State:
    """What a checkpoint holds; functions where counters move on between saves."""

    tensors: Mapping[str, Tensor]
    """What training updates in place: plain tensors that all ranks hold alike, and DTensors."""
    manifest: Callable[[], dict[str, Any]]
    """What is not a tensor, the same on every rank."""
    metadata: Callable[[], dict[str, Any]]
    """What people want to see in a list of checkpoints."""


class Saving:
    """Saves a training's state through a Checkpointer; one per attempt and rank."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        votes: VoteBox,
        interval: Interval,
        state: State,
        *,
        rank: int,
        fence: Fence | None,
        committed_step: int,
        longest_failing_s: float = math.inf,
    ) -> None:
        self._checkpointer, self._votes, self._interval, self._state = checkpointer, votes, interval, state
        self._rank, self._fence = rank, fence
        self._longest_failing_s = longest_failing_s
        self._failing_since: float | None = None
        self.committed_step = committed_step
        """The newest step of this run that is known to be in the store; 0 before the first commit."""
        self.noticed: Notice | None = None
        """What stops the job, the same on every rank; None until `save_on_notice`."""
        self._lost: LostRunError | None = None
        self._failures: Counter[int] = Counter()
        """How many saves of a step have failed."""

    def should_save(self, step: int) -> bool:
        """Whether rank 0 wants a save after this step; the other ranks learn it in the step's exchange."""
        self._note_outcomes(None)
        return self._rank == 0 and not self._checkpointer.busy and self._interval.should_save(step)

    def unsaved_too_long(self) -> Notice | None:
        """Return a notice where saves have failed for too long: the run then tries once more, and ends."""
        if self._failing_since is None or time.monotonic() - self._failing_since < self._longest_failing_s:
            return None
        minutes = self._longest_failing_s / 60
        return Notice("saves", f"every save has failed for {minutes:.0f} minutes", None)

    def note_step(self, seconds: float) -> None:
        """Note how long a step took, without saves; a derived interval follows it."""
        self._interval.measured_step(seconds)

    def lost(self) -> LostRunError | None:
        """Return the error of a run that a newer job has taken, as far as this rank knows."""
        return self._lost or (self._fence.lost if self._fence else None)

    def save(self, step: int, *, urgent: bool = False) -> float:
        """Begin a save of the state after `step`; returns the seconds for which the loop was blocked."""
        state = self._state
        try:
            # Nothing belongs to one rank: random streams are seeded anew for each micro-batch.
            blocked = self._checkpointer.save(step, state.tensors, state.manifest(), state.metadata(), urgent=urgent)
        except LostRunError as error:
            self._lost = error
            return 0.0
        self._interval.saved(step)
        self._interval.measured_stall(blocked)
        return blocked

    def save_on_notice(
        self, step: int, notice: Notice | None, report_notice: Callable[[Mapping[str, Any]], object]
    ) -> None:
        """Have a checkpoint committed before the capacity is gone: the one in flight, or a new one of `step`.

        `notice` is what this rank knows; before the save, `report_notice` gets what the ranks agreed to name (`Notice.fields`).
        Raises NotSavedError when neither commits, LostRunError when a newer job owns the run.
        """
        plan = self._plan(f"notice/{step}", notice)
        first = plan["notices"][0]
        self.noticed = Notice(first["source"], first["detail"], None)
        for known in plan["notices"]:
            report_notice(known)
        before = plan["committed"]
        if plan["do"] == "finish":
            self._finish_save()
            if self.committed_step > before and not self._plan(f"notice/{step}/then", notice)["time_left"]:
                return
        if self.committed_step != step:
            self.save(step, urgent=True)
            self._finish_save()
        if self.committed_step <= before and self.committed_step != step:
            raise NotSavedError(self._not_saved(step, f"after {self.noticed.summary}"))

    def _plan(self, topic: str, notice: Notice | None) -> Json:
        """Agree on what all ranks do about a notice, and on the reason they name: the lowest rank's that knows it."""

        def reduce(answers: Mapping[int, Json]) -> Json:
            known = [answer["notice"] for _, answer in sorted(answers.items()) if answer["notice"]]
            return plan_for_notice(answers) | {
                "notices": to_announce(known) or [Notice("signal", "a notice", None).fields()]
            }

        mine = {
            "left": None if notice is None else notice.remaining(time.monotonic()),
            "flight": self._checkpointer.remaining_s,
            "new": self._checkpointer.estimate_s,
            "committed": self.committed_step,
            "notice": notice and notice.fields(),
        }
        return gather_and_decide(self._votes, self._rank, topic, mine, reduce, NOTICE_VOTE_S)

    def finish(self, step: int) -> None:
        """Wait until the state after `step` is committed; NotSavedError if it cannot be, LostRunError if it must not be."""
        for tried in range(FINAL_TRIES):
            self._finish_save()
            if self.committed_step == step:
                return
            if tried:
                time.sleep(pause_s(tried, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            self.save(step, urgent=True)
        self._finish_save()
        if self.committed_step != step:
            # The step may have been due anyway, and that save has failed too.
            raise NotSavedError(self._not_saved(step, f"in {self._failures[step]} tries"))

    def wait(self) -> None:
        """Wait until no save is in flight; LostRunError when a newer job owns the run."""
        self._finish_save()

    def run_on_all_ranks(self, topic: str, work: Callable[[], Json | None]) -> None:
        """Do `work` on every rank; when it fails anywhere, every rank raises that."""
        run_on_all_ranks(self._votes, self._rank, topic, work)

    def close(self) -> None:
        """Stop the fence and the writer process."""
        if self._fence is not None:
            self._fence.close()
        self._checkpointer.close()

    def _finish_save(self) -> None:
        """Wait for the save in flight, if any; every rank learns the same outcome."""
        self._note_outcomes(self._checkpointer.longest_s)
        if self._lost is not None:
            raise self._lost

    def _note_outcomes(self, wait_s: float | None) -> None:
        try:
            outcomes = self._checkpointer.poll() if wait_s is None else self._checkpointer.wait(wait_s)
        except LostRunError as error:
            self._lost = error
            return
        for outcome in outcomes:
            if outcome.committed:
                self.committed_step = max(self.committed_step, outcome.step)
                self._failing_since = None
                self._interval.measured_save(outcome.seconds)
            else:
                self._failures[outcome.step] += 1
                self._failing_since = self._failing_since or time.monotonic()

    def _not_saved(self, step: int, when: str) -> str:
        return (
            f"step {step} could not be saved {when} (see the messages above); step {self.committed_step} is committed; "
            "fix: mend the store, then start again: the run goes on from there"
        )


def plan_for_notice(answers: Mapping[int, Json]) -> Json:
    """`do` (`finish` or `save`), whether there is `time_left` for a new save, and the step that all know as `committed`.

    Made from each rank's seconds left, of its save in flight, and of a new one; None where it does not know or has none.
    """
    ranks = list(answers.values())
    left = min((rank["left"] for rank in ranks if rank["left"] is not None), default=None)
    flight = max((rank["flight"] for rank in ranks if rank["flight"] is not None), default=None)
    new = max(rank["new"] for rank in ranks)
    # A rank may know already that the save in flight has committed while another does not.
    committed = min(rank["committed"] for rank in ranks)
    return {
        "do": choose_on_notice(flight, new, left),
        "time_left": left is None or new <= left,
        "committed": committed,
    }
