"""Ranks without the seconds that importing torch takes: a process that has imported it forks one child for each.

`ForkServer` is the client of `tests.fork_process`. A child behaves as a fresh `python -m MODULE` that `trainer.node.launcher`
started, but for two things: modules that the server holds are imported already, and it ends by os._exit once threads and exit
handlers are done, so destructors of libraries do not run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fork_process import ready
from tests.processes import children_of, command_line, pending, wait_until
from trainer.node.launcher import Placement

PATIENT = {"LUSTRAIN_SILENT_S": "300"}
"""A rank that a busy machine does not let run for a while is not lost."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    **PATIENT,
}
"""One thread per rank, since ranks share the cores; and what `trainer.__main__` sets before it imports torch."""
PATIENCE_S = 300.0
POLL_S = 0.002


@dataclass
class Rank:
    """One forked `python -m trainer`; `code` is its exit code, negative for a signal, None while it runs."""

    pid: int
    log: Path
    code: int | None = None

    def said(self) -> str:
        """Everything that it has printed, standard output and error together."""
        return self.log.read_text(errors="replace")


@dataclass
class Job:
    """The ranks of one attempt."""

    server: ForkServer
    ranks: list[Rank]
    placement: Placement
    """Keeps their port."""

    def running(self) -> list[Rank]:
        self.server.listen()
        return [rank for rank in self.ranks if rank.code is None]

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Signal these ranks (None: all) as far as they run; of what ends them, none goes on before all have it.

        A process that stands still may take a signal on any thread, and a SIGINT must wake the main one.
        """
        pids = [r.pid for at, r in enumerate(self.ranks) if r.code is None and (ranks is None or at in ranks)]
        together = len(pids) > 1 and number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)
        for one in [signal.SIGSTOP, number, signal.SIGCONT] if together else [number]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, one)

    def tell(self, number: int) -> None:
        """Signal all ranks, and return once each has taken it: the next one is another and not the same."""
        self.send(number)
        wait_until(lambda: not any(pending(rank.pid, number) for rank in self.ranks if rank.code is None))

    def wait(self, timeout: float = PATIENCE_S) -> list[int]:
        """All exit codes by rank; AssertionError with what the ranks said when they take longer."""
        end = time.monotonic() + timeout
        while self.running():
            assert time.monotonic() < end, f"still running after {timeout:.0f} s:\n{self.said()}"
            self.server.listen(0.05)
        return self.codes()

    def codes(self) -> list[int]:
        return [rank.code for rank in self.ranks if rank.code is not None]

    def said(self) -> str:
        return "\n".join(f"rank {number}:\n{rank.said()}" for number, rank in enumerate(self.ranks))

    def wait_for(self, text: str, rank: int = 0, timeout: float = PATIENCE_S) -> None:
        """Return as soon as a rank has printed `text`; AssertionError when it ended or took too long before."""
        self.wait_for_lines(text, 1, rank, timeout)

    def wait_for_lines(self, text: str, times: int, rank: int = 0, timeout: float = PATIENCE_S) -> None:
        """As `wait_for`, until `text` was printed that many times."""
        end = time.monotonic() + timeout
        while self.ranks[rank].said().count(text) < times:
            assert self.running(), f"ended with {self.codes()} before it said {text!r}:\n{self.said()}"
            assert time.monotonic() < end, f"not said within {timeout:.0f} s: {text!r}:\n{self.said()}"
            time.sleep(POLL_S)

    def writers(self) -> dict[int, list[int]]:
        """By rank, the process ids of its checkpoint writers."""
        return {number: writers_of(rank.pid) for number, rank in enumerate(self.ranks) if rank.code is None}


class ForkServer:
    """Starts the server and talks to it; one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._ranks: dict[int, Rank] = {}
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            cwd=Path(__file__).parents[1],
            bufsize=0,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._answer("ready")

    def start(
        self,
        arguments: Sequence[str],
        nproc: int,
        environment: Mapping[str, str] | None = None,
        module: str = "trainer",
    ) -> Job:
        """`python -m MODULE ARGUMENTS` on `nproc` ranks that meet at a free loopback port."""
        assert self._process.stdin is not None
        self._count += 1
        logs = [self._folder / f"{self._count:05d}-{rank}.log" for rank in range(nproc)]
        placement = Placement.alone(nproc)
        for log in logs:
            log.touch()
        base = {**os.environ, **ENVIRONMENT, **(environment or {})}
        environments = placement.environments(base)
        request = {
            "module": module,
            "arguments": list(arguments),
            "folder": os.getcwd(),
            "ranks": [[environment, str(log)] for environment, log in zip(environments, logs, strict=True)],
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pids = self._answer("started")
        ranks = [Rank(pid, log) for pid, log in zip(pids, logs, strict=True)]
        self._ranks.update({rank.pid: rank for rank in ranks})
        return Job(self, ranks, placement)

    def call(self, work: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
        """`work(rank, *args)` on every rank at once; its results by rank. `work` is a function of a module.

        AssertionError with what the ranks said where one of them raises.
        """
        import torch

        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            torch.save((work, args), f"{name}/call")
            job = self.start([name, *sys.path], nproc, module="tests.fork_call")
            assert set(job.wait(4 * PATIENCE_S)) == {0}, job.said()
            return [torch.load(f"{name}/{rank}", weights_only=False) for rank in range(nproc)]

    def listen(self, wait_s: float = 0.0) -> None:
        """Note the ranks that have ended, waiting up to `wait_s` for news."""
        for kind, value in self._lines(wait_s):
            assert kind == "ended", f"the fork server says {kind}: {value}"
            pid, code = value
            # Others are what a rank left behind; `left_behind` finds them while they run.
            if pid in self._ranks:
                self._ranks.pop(pid).code = code

    def left_behind(self) -> list[str]:
        """Command lines of processes that run without a rank of theirs, e.g. writers that outlive it."""
        self.listen()
        return [f"{pid}: {command_line(pid)}" for pid in children_of(self._process.pid) if pid not in self._ranks]

    def close(self) -> None:
        """End the server and everything it started."""
        for pid in children_of(self._process.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _answer(self, wanted: str) -> Any:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < end, f"the fork server did not say {wanted!r} within {PATIENCE_S:.0f} s"
            for kind, value in self._lines(0.1, until=wanted):
                if kind == wanted:
                    return value
                pid, code = value
                if pid in self._ranks:
                    self._ranks.pop(pid).code = code

    def _lines(self, wait_s: float, until: str = "") -> list[tuple[str, Any]]:
        assert self._process.stdout is not None
        out = self._process.stdout
        if b"\n" not in self._pending and ready([out.fileno()], wait_s):
            some = out.read(1 << 16)
            assert some, "the fork server has ended"
            self._pending += some
        *whole, self._pending = self._pending.split(b"\n")
        return [tuple(json.loads(line)) for line in whole]


def writers_of(pid: int) -> list[int]:
    """The checkpoint writers of one rank."""
    return [child for child in children_of(pid) if "trainer.checkpoint.save.writer" in command_line(child)]
