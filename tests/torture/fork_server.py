"""Ranks without the seconds that importing torch takes: a process that has imported it forks one child for each.

`python -m tests.torture.fork_server` reads one JSON request per line and answers with lines of JSON; `ForkServer` is the
client. The server never runs a torch operation itself, so its children begin as a fresh `python -m trainer` would. It adopts
what its children leave behind (PR_SET_CHILD_SUBREAPER), so a process that outlives its rank cannot hide.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer.launch.local import rank_environment

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""One thread per rank, since ranks share the cores; and what `trainer.__main__` sets before it imports torch."""
IMPORTED = (
    "trainer.train",
    "trainer.tasks.language_model",
    "trainer.storage.s3",
    "trainer.storage.crt",
    "torch._dynamo",
)
"""torch imports the last of them itself, seconds long, when the first optimizer is made."""
PATIENCE_S = 60.0
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
    began: float = field(default_factory=time.monotonic)

    def running(self) -> list[Rank]:
        self.server.listen()
        return [rank for rank in self.ranks if rank.code is None]

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Signal these ranks (None: all) as far as they run."""
        for at, rank in enumerate(self.ranks):
            if rank.code is None and (ranks is None or at in ranks):
                os.kill(rank.pid, number)

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
            [sys.executable, "-m", "tests.torture.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            cwd=Path(__file__).parents[2],
            bufsize=0,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._answer("ready")

    def start(self, arguments: Sequence[str], nproc: int, environment: Mapping[str, str] | None = None) -> Job:
        """`python -m trainer ARGUMENTS` on `nproc` ranks that meet at a free loopback port."""
        assert self._process.stdin is not None
        self._count += 1
        logs = [self._folder / f"{self._count:05d}-{rank}.log" for rank in range(nproc)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for log in logs:
            log.touch()
        base = {**os.environ, **(environment or {}), **ENVIRONMENT}
        request = {
            "arguments": list(arguments),
            "ranks": [[rank_environment(rank, nproc, port, base), str(log)] for rank, log in enumerate(logs)],
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pids = self._answer("started")
        ranks = [Rank(pid, log) for pid, log in zip(pids, logs, strict=True)]
        self._ranks.update({rank.pid: rank for rank in ranks})
        return Job(self, ranks)

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
        if b"\n" not in self._pending and _ready([out.fileno()], wait_s):
            some = out.read(1 << 16)
            assert some, "the fork server has ended"
            self._pending += some
        *whole, self._pending = self._pending.split(b"\n")
        return [tuple(json.loads(line)) for line in whole]


def children_of(pid: int) -> list[int]:
    """Direct children of a process, over all its threads; none when it is gone."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listing.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def writers_of(pid: int) -> list[int]:
    """The checkpoint writers of one rank."""
    return [child for child in children_of(pid) if "trainer.checkpoint.writer" in command_line(child)]


def serve() -> None:
    """Fork as asked, report what ends, until standard input closes."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in IMPORTED:
        importlib.import_module(name)

    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # Unbuffered: what is left in a buffer would not make `poll` return.
    requests = open(0, "rb", buffering=0)  # noqa: SIM115
    _say("ready", None)
    while True:
        readable = _ready([requests.fileno(), wake], None)
        if wake in readable:
            os.read(wake, 1 << 12)
            _reap()
        if requests.fileno() in readable:
            line = requests.readline()
            if not line:
                return
            request = json.loads(line)
            _say("started", [_fork(request["arguments"], *rank) for rank in request["ranks"]])


def _ready(descriptors: Sequence[int], wait_s: float | None) -> list[int]:
    """Not select(2): it takes no descriptor over 1023, and a long test session may have more."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [found for found, _ in poll.poll(None if wait_s is None else wait_s * 1000)]


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say("ended", [pid, os.waitstatus_to_exitcode(status)])


def _fork(arguments: list[str], environment: dict[str, str], log: str) -> int:
    pid = os.fork()
    return pid or _be_rank(arguments, environment, log)


def _be_rank(arguments: list[str], environment: dict[str, str], log: str) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(log, "wb") as out, open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        from trainer.__main__ import main

        code = main(arguments)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(kind: str, value: Any) -> None:
    os.write(1, json.dumps([kind, value]).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    serve()
