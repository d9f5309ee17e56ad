"""How a launch ended, as the launcher of one node saw it, and the record of that in the run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lustrain.problem import UserError
from trainer.environment import launch_attempt
from trainer.errors import EXIT_DONE


@dataclass(frozen=True)
class NodeExit:
    """The job's exit code, that of this node's ranks, which nodes were silent or never came, and a failed rank's line."""

    code: int
    local_code: int
    lost_nodes: str = ""
    error: str = ""


def report_exit(uri: str, node: int, end: NodeExit) -> None:
    """Record in the run at `uri` how the launch ended, for the supervisor's decision; nothing where all steps are done.

    A launch that has saved is recorded too: a scheduler has its own code for a launcher that was killed or cancelled.
    """
    attempt = launch_attempt()
    if not uri or attempt is None or end.code == EXIT_DONE:
        return
    # Loads the S3 client, which a launch that ends well does not need.
    from trainer.run.journal import put_node_exit

    try:
        put_node_exit(uri, attempt, node, end.code, end.local_code, end.lost_nodes, end.error)
    except UserError as error:
        print(f"the reason of the end is not recorded in the run: {error}", file=sys.stderr)
