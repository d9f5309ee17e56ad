"""How an attempt ended, as the launcher of one node saw it, and the record of that in the run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lustrain.problem import UserError
from trainer.errors import EXIT_DONE
from trainer.launch.attempt import launch_attempt


@dataclass(frozen=True)
class Ending:
    """The job's exit code, that of this node's ranks, which nodes were silent or never came, and a failed rank's line."""

    code: int
    own: int
    silent: str = ""
    said: str = ""


def leave_end(uri: str, node: int, end: Ending) -> None:
    """Put into the run at `uri` how the attempt ended, for whoever decides what is next; nothing where all steps are done.

    Also of an attempt that has saved: of a launcher that was killed or cancelled a scheduler has a code of its own.
    """
    attempt = launch_attempt()
    if not uri or attempt is None or end.code == EXIT_DONE:
        return
    # Loads what speaks to S3, which an attempt that ends well does not need.
    from trainer.launch.journal import put_end

    try:
        put_end(uri, attempt, node, end.code, end.own, end.silent, end.said)
    except UserError as error:
        print(f"the reason of the end is not recorded in the run: {error}", file=sys.stderr)
