"""One decision for all ranks: each says what it knows, rank 0 judges, all hear the same. No collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lustrain.problem import UserError
from trainer.checkpoint.votes import VoteBox

START_S = 1800.0
"""For a step of the start: one rank may take that long to open its data or to read its weights back."""

Json = dict[str, Any]
Judge = Callable[[dict[int, Json]], Json]


def decide(votes: VoteBox, rank: int, topic: str, mine: Json, judge: Judge, timeout_s: float) -> Json:
    """What `judge` makes, on rank 0, of every rank's word; the same on every rank.

    A UserError of the judge is raised on every rank. VoteTimeout when a rank is silent for `timeout_s`.
    """
    votes.post(topic, rank, mine)
    outcome = f"{topic}/outcome"
    if rank == 0:
        said = votes.gather(topic, timeout_s)
        try:
            votes.post(outcome, 0, {"value": judge(said)})
        except UserError as error:
            votes.post(outcome, 0, {"problems": error.problems, "exit_code": error.exit_code})
    # The others may have to wait for the slowest rank and then for rank 0's judgement.
    heard = votes.gather(outcome, timeout_s + 60.0, ranks=[0])[0]
    if "problems" in heard:
        failure = UserError(heard["problems"])
        failure.exit_code = heard["exit_code"]
        raise failure
    return dict(heard["value"])


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

    def judged(said: dict[int, Json]) -> Json:
        refused = [one for _, one in sorted(said.items()) if "problems" in one]
        if refused:
            failure = UserError(list(dict.fromkeys(line for one in refused for line in one["problems"])))
            failure.exit_code = max(one["exit_code"] for one in refused)
            raise failure
        return judge({one: word["value"] for one, word in said.items()}) if judge else {}

    try:
        return decide(votes, rank, topic, mine, judged, START_S)
    except UserError:
        if defect is not None:
            raise defect from None
        raise
