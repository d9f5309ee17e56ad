"""Start N ranks on this machine: `python -m trainer.node.local --nproc 2 -- train CONFIG.toml`.

What it does that torchrun does not: it hands the trainer's own exit code on (torchrun answers 1 to everything, and a
launcher could not tell 85, requeue, from a failure), and it passes signals on and then waits as long as the ranks need.
If it is killed, no rank stays behind beside the next job: those that train save and stop, those still starting end at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from lustrain.problem import UserError, problem
from trainer.environment import launch_attempt
from trainer.node.exit_report import NodeExit, report_exit
from trainer.node.output import RankOutput
from trainer.node.ranks import FORWARDED, Ranks

GRACE_S = 20.0
"""How long the other ranks may go on once one of them has failed: they notice a lost peer within a collective."""


def rank_environment(rank: int, nproc: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return what `torch.distributed` reads, for one of `nproc` ranks that meet at a loopback `port`."""
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)),
        "GLOO_SOCKET_IFNAME": "lo",
        **base,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class LocalJob(Ranks):
    """All ranks of a job, on this machine."""

    def __init__(
        self,
        arguments: Sequence[str],
        nproc: int,
        environment: Mapping[str, str] | None = None,
        output: RankOutput | None = None,
    ) -> None:
        base = os.environ if environment is None else environment
        port = _free_port()
        super().__init__(arguments, [rank_environment(rank, nproc, port, base) for rank in range(nproc)], output=output)

    def wait(self) -> int:
        """Wait for all ranks and return the job's exit code; after one failed, the rest get `GRACE_S` and are then killed."""
        kill_at: float | None = None
        while self.running():
            if self.failed() and kill_at is None:
                kill_at = time.monotonic() + GRACE_S
            if kill_at is not None and time.monotonic() > kill_at:
                self.kill()
            self.kill_if_hung()
            time.sleep(0.05)
        self.close_output()
        return self.exit_code()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.node.local", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="ranks to start on this machine")
    parser.add_argument("--run", default="", metavar="URI", help="where to record why an attempt failed")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="keep what ranks print in FILE too, unless they print to a terminal"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="--, then the arguments of `python -m trainer`")
    args = parser.parse_args(argv)
    if args.nproc < 1:
        raise UserError(problem("--nproc", args.nproc, "a job needs at least one rank", allowed=">= 1"))
    arguments = [word for word in args.arguments if word != "--"]
    if not arguments:
        parser.error("the arguments of `python -m trainer` are missing after --, e.g. -- train CONFIG.toml")
    jobs: list[LocalJob] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        for job in jobs:
            job.send(number)

    # A signal waits until there is someone to pass it on to; ranks begin with it held, and let go once they listen.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        for number in FORWARDED:
            signal.signal(number, forward)
        # On a terminal ranks show a bar, which is of no use in a file.
        output = RankOutput(launch_attempt(), args.log) if args.log and not sys.stdout.isatty() else None
        jobs.append(LocalJob(arguments, args.nproc, output=output))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = jobs[0].wait()
    report_exit(args.run, 0, NodeExit(code, code, error=jobs[0].error_line()))
    return code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
