"""Ranks that end: one that is gone becomes one line on the others, and rank 0 leaves last.

Rank 0 may host the store through which all ranks talk, so its last message can be read only while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lustrain.problem import UserError
from trainer.errors import EXIT_PEERS
from trainer.parallel import World
from trainer.parallel.agree import reason_of
from trainer.parallel.votes import VoteBox, VoteError

FAREWELL_S = 30.0
"""How long rank 0 stays for the others, who have only to hear the last verdict and to end their writers."""
_SOURCE = re.compile(r"^\[\S*/gloo/\S*\] ")
"""gloo begins its messages with the place in its source."""


class LostRankError(UserError):
    """Another rank ended or does not answer any more; what was committed is intact."""

    exit_code = EXIT_PEERS
    everywhere = True


@contextmanager
def report_lost_ranks(world: World) -> Iterator[None]:
    """Turn whatever an exchange between ranks raises when one of them is gone into a LostRankError."""
    try:
        yield
    except (RuntimeError, VoteError) as error:
        if world.world_size == 1 or not is_lost_rank(error):
            raise
        reason = _SOURCE.sub("", str(error)).partition("This is typically")[0].strip(" .").splitlines()[0][:300]
        raise LostRankError(
            f"rank {world.rank} of {world.world_size}: another rank is gone or silent ({reason}); what is committed is intact; "
            "fix: look at the last lines of that rank, then start the job again: it goes on from the newest checkpoint"
        ) from error


def is_lost_rank(error: Exception) -> bool:
    """Whether this says that a rank cannot be reached; gloo raises a plain RuntimeError that names its source file."""
    return isinstance(error, (dist.DistError, VoteError)) or "gloo/transport" in str(error)


@contextmanager
def rank_0_last(world: World, votes: VoteBox) -> Iterator[None]:
    """Have rank 0 wait for the others when all ranks end together: done, stopped, or refused alike.

    A rank that ends for a reason of its own lets those know that wait for its vote.
    """
    try:
        yield
    except UserError:
        _part(world, votes)
        raise
    except BaseException as error:
        with suppress(VoteError):
            votes.post("farewell", world.rank, {})
            votes.withdraw(world.rank, reason_of(error))
        raise
    _part(world, votes)


def _part(world: World, votes: VoteBox) -> None:
    with suppress(VoteError):
        votes.post("farewell", world.rank, {})
        if world.rank == 0:
            votes.gather("farewell", FAREWELL_S)
