"""One decision for all ranks: each posts what it knows, rank 0 decides, all read the same. No collectives.

Each rank posts once and reads rank 0's outcome, and only rank 0 reads all posts: N ranks decide in O(N) round trips.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from lustrain.problem import UserError
from trainer.errors import EXIT_FAILURE
from trainer.parallel.votes import RankGoneError, VoteBox, VoteError, VoteTimeout

START_S = 1800.0
"""For a step of the start: one rank may take that long to open its data or to read its weights back."""
HEARD_S = 30.0
"""How long rank 0, whose process may host the store, stays until the others have read why it ends."""

Json = dict[str, Any]
Reduce = Callable[[dict[int, Json]], Json]


def gather_and_decide(votes: VoteBox, rank: int, topic: str, value: Json, reduce: Reduce, timeout_s: float) -> Json:
    """Return what `reduce` makes, on rank 0, of every rank's answer; the same on every rank.

    A UserError of `reduce` is raised on every rank; any other error on rank 0, and as one line on the others.
    On every rank VoteTimeout when one is silent for `timeout_s`, RankGoneError when one has left.
    """
    votes.post(topic, rank, value)
    if rank == 0:
        _post_decision(votes, topic, reduce, timeout_s)
    # The others may have to wait for the slowest rank and then for rank 0's decision.
    outcome = votes.gather(_outcome(topic), timeout_s + 60.0, ranks=[0])[0]
    if "value" in outcome:
        return dict(outcome["value"])
    if rank:
        votes.post(_heard(topic), rank, {})
    if "missing" in outcome:
        raise VoteTimeout(topic, outcome["missing"], timeout_s)
    if "gone" in outcome:
        raise RankGoneError(topic, {int(rank): why for rank, why in outcome["gone"].items()})
    raise UserError(outcome["problems"], outcome["exit_code"])


def run_on_all_ranks(
    votes: VoteBox,
    rank: int,
    topic: str,
    work: Callable[[], Json | None],
    reduce: Reduce | None = None,
    *,
    timeout_s: float = START_S,
) -> Json:
    """Do `work` on every rank, and return what `reduce` makes of the results (nothing by default).

    If it fails anywhere, every rank raises all ranks' problems, each line once; a rank's defect also keeps its own trace. Where
    the others cannot be reached any more, a rank raises its own failure rather than theirs.
    A rank that is interrupted (KeyboardInterrupt, SystemExit) posts that and leaves at once, without the others' results.
    """
    failure: Exception | None = None
    try:
        # What JSON cannot hold must fail here, too, and not in the post that the others wait for.
        value: Json = {"value": json.loads(json.dumps(work() or {}))}
    except UserError as error:
        failure = error
        value = _refusal(error)
    except Exception as error:  # noqa: BLE001 -- the others must not wait for a rank that is about to leave
        failure = error
        value = _defect(rank, error)
    except BaseException as error:
        _post_interrupt(votes, rank, topic, error)
        raise

    def reduced(answers: dict[int, Json]) -> Json:
        refused = [answer for _, answer in sorted(answers.items()) if "problems" in answer]
        if refused:
            lines = dict.fromkeys(line for answer in refused for line in answer["problems"])
            raise UserError(lines, max(answer["exit_code"] for answer in refused))
        return reduce({rank: answer["value"] for rank, answer in answers.items()}) if reduce else {}

    try:
        return gather_and_decide(votes, rank, topic, value, reduced, timeout_s)
    except UserError:
        if failure is None or isinstance(failure, UserError):
            raise
        if rank == 0:
            _stay_until_heard(votes, topic, range(1, votes.world_size))
        raise failure from None
    except VoteError:
        if failure is None:
            raise
        raise failure from None


def reason_of(error: BaseException) -> str:
    """Return the kind and the first line of an error, as ranks show another's."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _post_decision(votes: VoteBox, topic: str, reduce: Reduce, timeout_s: float) -> None:
    """Post rank 0's outcome; other errors than UserErrors are also raised here, once the others have read it."""
    try:
        votes.post(_outcome(topic), 0, {"value": reduce(votes.gather(topic, timeout_s))})
    except UserError as error:
        votes.post(_outcome(topic), 0, _refusal(error))
    except VoteTimeout as error:
        _post_absence(votes, topic, {"missing": error.missing}, error.missing)
        raise
    except RankGoneError as error:
        _post_absence(votes, topic, {"gone": error.reasons}, error.reasons)
        raise
    except VoteError:
        raise
    except Exception as error:
        votes.post(_outcome(topic), 0, _defect(0, error))
        _stay_until_heard(votes, topic, range(1, votes.world_size))
        raise
    except BaseException as error:
        with suppress(VoteError):
            votes.post(_outcome(topic), 0, _defect(0, error))
        raise


def _post_absence(votes: VoteBox, topic: str, outcome: Json, absent: Iterable[int]) -> None:
    with suppress(VoteError):
        votes.post(_outcome(topic), 0, outcome)
        _stay_until_heard(votes, topic, {*range(1, votes.world_size)} - {*absent})


def _post_interrupt(votes: VoteBox, rank: int, topic: str, error: BaseException) -> None:
    """Let the others know without waiting for any of them: who interrupts a rank wants it to end now."""
    with suppress(VoteError):
        votes.post(topic if rank else _outcome(topic), rank, _defect(rank, error))
        votes.post(_heard(topic), rank, {})


def _stay_until_heard(votes: VoteBox, topic: str, ranks: Iterable[int]) -> None:
    with suppress(VoteError):
        votes.gather(_heard(topic), HEARD_S, ranks=sorted(ranks))


def _refusal(error: UserError) -> Json:
    return {"problems": error.problems, "exit_code": error.exit_code}


def _defect(rank: int, error: BaseException) -> Json:
    return {"problems": [f"rank {rank}: {reason_of(error)}"], "exit_code": EXIT_FAILURE}


def _outcome(topic: str) -> str:
    return f"{topic}/outcome"


def _heard(topic: str) -> str:
    return f"{topic}/heard"
