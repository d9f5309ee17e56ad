"""A rank that is gone, as one line on every rank that is left, instead of its transport's traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainer.checkpoint.votes import VoteError
from trainer.errors import UserError
from trainer.parallel import World

_SOURCE = re.compile(r"^\[\S*/gloo/\S*\] ")
"""gloo begins its messages with the place in its source."""


class LostRankError(UserError):
    """Another rank ended or does not answer any more; what was committed is intact."""

    exit_code = 1
    everywhere = True


@contextmanager
def lost_ranks_told(world: World) -> Iterator[None]:
    """Turn whatever an exchange between ranks raises when one of them is gone into a LostRankError."""
    try:
        yield
    except (RuntimeError, VoteError) as error:
        if world.world_size == 1 or not is_lost_rank(error):
            raise
        said = _SOURCE.sub("", str(error)).partition("This is typically")[0].strip(" .").splitlines()[0][:300]
        raise LostRankError(
            f"rank {world.rank} of {world.world_size}: another rank is gone or silent ({said}); what is committed is intact; "
            "fix: look for what that rank said last, then start the job again: it goes on from the newest checkpoint"
        ) from error


def is_lost_rank(error: Exception) -> bool:
    """Whether this says that a rank cannot be reached; gloo raises a plain RuntimeError that names its source file."""
    return isinstance(error, (dist.DistError, VoteError)) or "gloo/transport" in str(error)
