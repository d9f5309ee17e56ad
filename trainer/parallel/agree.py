"""One decision for all ranks: each posts what it knows, rank 0 decides, all read the same. No collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lustrain.problem import UserError
from trainer.parallel.votes import VoteBox

START_S = 1800.0
"""For a step of the start: one rank may take that long to open its data or to read its weights back."""

Json = dict[str, Any]
Judge = Callable[[dict[int, Json]], Json]


def decide(votes: VoteBox, rank: int, topic: str, mine: Json, judge: Judge, timeout_s: float) -> Json:
    """Return what `judge` makes, on rank 0, of every rank's answer; the same on every rank.

    A UserError of the judge is raised on every rank. VoteTimeout when a rank is silent for `timeout_s`.
    """
    votes.post(topic, rank, mine)
    verdict = f"{topic}/outcome"
    if rank == 0:
        answers = votes.gather(topic, timeout_s)
        try:
            votes.post(verdict, 0, {"value": judge(answers)})
        except UserError as error:
            votes.post(verdict, 0, {"problems": error.problems, "exit_code": error.exit_code})
    # The others may have to wait for the slowest rank and then for rank 0's judgement.
    outcome = votes.gather(verdict, timeout_s + 60.0, ranks=[0])[0]
    if "problems" in outcome:
        raise UserError(outcome["problems"], outcome["exit_code"])
    return dict(outcome["value"])


def together(
    votes: VoteBox, rank: int, topic: str, work: Callable[[], Json | None], judge: Judge | None = None
) -> Json:
    """Do `work` on every rank, and return what `judge` makes of the results (nothing by default).

    If it fails anywhere, every rank raises all ranks' problems, each line once; a rank's defect also keeps its own trace.
    """
    defect: Exception | None = None
    try:
        mine: Json = {"value": work() or {}}
    except UserError as error:
        mine = {"problems": error.problems, "exit_code": error.exit_code}
    except Exception as error:  # noqa: BLE001 -- the others must not wait for a rank that is about to leave
        defect = error
        mine = {"problems": [f"rank {rank}: {type(error).__name__}: {error}"], "exit_code": 1}

    def judged(answers: dict[int, Json]) -> Json:
        refused = [answer for _, answer in sorted(answers.items()) if "problems" in answer]
        if refused:
            lines = dict.fromkeys(line for answer in refused for line in answer["problems"])
            raise UserError(lines, max(answer["exit_code"] for answer in refused))
        return judge({rank: answer["value"] for rank, answer in answers.items()}) if judge else {}

    try:
        return decide(votes, rank, topic, mine, judged, START_S)
    except UserError:
        if defect is not None:
            raise defect from None
        raise
