"""Ranks as child processes of this one, and the exit code of the job that they make."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lustrain.process import LAUNCHER
from trainer.environment import ERROR_FILE
from trainer.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PEERS, EXIT_REQUEUE, job_exit_code
from trainer.node.output import RankOutput
from trainer.node.watchdog import CLOCK, MIN_HUNG_S, overdue_s

MAIN_STACK = signal.SIGRTMIN
"""On which a rank prints the stack of its main thread, and goes on (`trainer.train.run`)."""
STACKS = signal.SIGUSR2
"""On which it prints those of all its threads. This may crash it: the others run while faulthandler reads their frames."""
STACKS_S = 1.0
"""What the ranks of a node need for either."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that a launcher passes on to its ranks."""


class Ranks:
    """One process for each environment; they end with the thread that makes this object (`lustrain.process`)."""

    def __init__(
        self,
        arguments: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        hung_s: float = MIN_HUNG_S,
        output: RankOutput | None = None,
    ) -> None:
        """`hung_s`: a step that takes so long, and ten times the usual, is taken for one that hangs. Without `output` the ranks
        print where this process does."""
        self._hung_s, self._hung = hung_s, False
        self._folder = tempfile.TemporaryDirectory(prefix="lustrain-ranks-")
        self._clocks = [Path(self._folder.name, str(number)) for number in range(len(environments))]
        self._error_files = [Path(self._folder.name, f"{number}.error") for number in range(len(environments))]
        self._output = output
        pipes = [output.pipes(int(one["RANK"])) if output else (None, None) for one in environments]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "trainer", *arguments],
                env={**environment, LAUNCHER: str(os.getpid()), CLOCK: str(clock), ERROR_FILE: str(error_file)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,  # a terminal's Ctrl-C then reaches the ranks once, through us
            )
            for environment, clock, error_file, (out, err) in zip(
                environments, self._clocks, self._error_files, pipes, strict=True
            )
        ]
        if output is not None:
            output.start()
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

    def kill_if_hung(self) -> bool:
        """Kill the ranks if the step of one hangs, after each has printed what its threads do; whether that was so."""
        now = time.monotonic()
        overdue = [overdue_s(clock, now, self._hung_s) for clock in self._clocks]
        seconds = max((seconds for seconds in overdue if seconds is not None), default=None)
        if seconds is None or self._hung:
            return self._hung
        self._hung = True
        fix = "look where each rank waits; its stack is above"
        for number in (MAIN_STACK, STACKS):
            self.send(number)
            time.sleep(STACKS_S)
        print(f"no step has ended for {seconds:.0f} s: the ranks hang, and are killed; fix: {fix}", file=sys.stderr)
        self.kill()
        return True

    def close_output(self) -> None:
        """Pass on what the ranks, which have ended, printed last."""
        if self._output is not None:
            self._output.close()

    def exit_code(self) -> int:
        """Return the code of the ranks that ended by themselves; EXIT_PEERS where none did, EXIT_FAILURE if they hung."""
        if self._hung:
            return EXIT_FAILURE
        codes = [rank.returncode for rank in self.ranks if rank.pid not in self._killed]
        return job_exit_code(codes) if codes else EXIT_PEERS

    def error_line(self) -> str:
        """Return the line with which a rank failed: of one that is itself the cause, if there is any."""
        if self._hung:
            return "the ranks hang"
        pairs = zip(self.ranks, self._error_files, strict=True)
        ended = [(rank.returncode, file) for rank, file in pairs if rank.pid not in self._killed]
        innocent = (None, EXIT_DONE, EXIT_REQUEUE, EXIT_PEERS)
        errors = [(code in innocent, file.read_text(errors="replace")) for code, file in ended if file.exists()]
        killed = next((-code for code, _ in ended if code is not None and code < 0), 0)
        if killed and all(is_innocent for is_innocent, _ in errors):
            return f"a rank was killed by {signal.Signals(killed).name}"
        return min(errors, default=(True, ""))[1]
