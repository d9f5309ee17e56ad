"""Ranks as child processes of this one, and the exit code that they are worth together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from lustrain.process import LAUNCHER
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILURE, EXIT_LOST_RUN, EXIT_PEERS, EXIT_REQUEUE

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that a launcher passes on to its ranks."""


def job_exit_code(codes: Sequence[int]) -> int:
    """Return the job's exit code: what all ranks agree on, else the one that says most; death by a signal counts as 1.

    A rank that ends with EXIT_PEERS names no cause, so any other failure goes before it.
    """
    if set(codes) <= {EXIT_DONE}:
        return EXIT_DONE
    if set(codes) <= {EXIT_DONE, EXIT_REQUEUE}:
        return EXIT_REQUEUE
    for code in (EXIT_LOST_RUN, EXIT_CONFIG):
        if code in codes:
            return code
    causes = [code for code in codes if code not in (EXIT_DONE, EXIT_REQUEUE, EXIT_PEERS)]
    if not causes:
        return EXIT_PEERS
    return next((code for code in causes if code > 0), EXIT_FAILURE)


class Ranks:
    """One process for each environment; they end with the thread that makes this object (`lustrain.process`)."""

    def __init__(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "trainer", *arguments],
                env={**environment, LAUNCHER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C then reaches the ranks once, through us
            )
            for environment in environments
        ]
        self._killed: set[int] = set()

    def send(self, number: int) -> None:
        """Pass a signal to every rank that still runs."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def running(self) -> bool:
        """Whether any rank still runs."""
        return any(rank.poll() is None for rank in self.ranks)

    def failed(self) -> bool:
        """Whether a rank has ended, and not with what a whole job ends with."""
        return any(rank.returncode not in (None, EXIT_DONE, EXIT_REQUEUE) for rank in self.ranks)

    def kill(self) -> None:
        """End every rank that still runs; how it ends then says nothing of the job."""
        self._killed |= {rank.pid for rank in self.ranks if rank.poll() is None}
        self.send(signal.SIGKILL)

    def exit_code(self) -> int:
        """Return the code of the ranks that ended by themselves; EXIT_PEERS where none did."""
        codes = [rank.returncode for rank in self.ranks if rank.pid not in self._killed]
        return job_exit_code(codes) if codes else EXIT_PEERS
