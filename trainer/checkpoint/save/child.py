"""The trainer's end of the writer process: its start, memory shared with it, its jobs, and a new one when it died."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import trainer
from trainer.checkpoint.format.records import Entry
from trainer.checkpoint.save.writer import Job, StoreResult, decode_result

_END_S = 2.0
"""How long a writer may take to end before it is killed."""


class WriterDiedError(Exception):
    """The writer process ended, or did not answer in time and was ended; what it was writing is lost."""


class SharedMemory(Protocol):
    """Memory that is shared with the writer: `number` is never used twice."""

    number: int
    fd: int
    size: int


class WriterProcess:
    """One child process and what was sent to it so far. One thread hands out jobs; `kill` may come from any.

    The kernel ends the child with the *thread* that started it, so jobs must come from a thread that outlives them all.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._memories: set[int] = set()
        self._entries: Sequence[Entry] | None = None
        self._killed = False

    def start(self) -> None:
        """Make sure that a child is running; returns before it is ready for work."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self._reap()
            self.restarts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # A group of its own keeps Ctrl-C and kills of the job's group away. A session of its own would too, but Linux
        # may schedule sessions against each other (autogroup), and the writer would take half of the cores.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.checkpoint.save.writer", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env={**os.environ, "PYTHONPATH": _python_path()},
            )
        self._control, self._memories, self._entries = ours, set(), None

    def write(
        self, job: Job, memory: SharedMemory, entries: Sequence[Entry], *, living: Collection[int], timeout_s: float
    ) -> StoreResult:
        """Have one save stored and return how it went; memory not among the numbers `living` is released before.

        Raises WriterDiedError.
        """
        self.start()
        assert self._control is not None
        try:
            self._control.settimeout(timeout_s)
            self._share(memory, living)
            if self._entries is not entries:
                self._send({"op": "entries", "entries": [asdict(entry) for entry in entries]})
                self._entries = entries
            self._send({"op": "save", **asdict(job)})
            return decode_result(self._line())
        except TimeoutError:
            self.kill()
            self._ending()
            raise WriterDiedError(f"the writer process gave no answer for {timeout_s:.0f} s and was killed") from None
        except (BrokenPipeError, ConnectionResetError, EOFError):
            raise WriterDiedError(f"the writer process {self._ending()}") from None

    def kill(self) -> None:
        """End the child at once; a `write` under way in another thread raises WriterDiedError."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """End the child and wait for it, a few seconds at most."""
        if self._process is not None:
            self._reap()
            self._process = None

    @property
    def pid(self) -> int | None:
        """The child's process id, while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def _share(self, memory: SharedMemory, living: Collection[int]) -> None:
        for number in self._memories.difference(living):
            self._send({"op": "forget", "number": number})
            self._memories.remove(number)
        if memory.number not in self._memories:
            self._send({"op": "memory", "number": memory.number, "size": memory.size}, [memory.fd])
            self._memories.add(memory.number)

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        assert self._control is not None
        line = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self._control, [line], fds) if fds else 0
        self._control.sendall(line[sent:])

    def _line(self) -> bytes:
        assert self._control is not None
        pending = bytearray()
        while not pending.endswith(b"\n"):
            some = self._control.recv(1 << 16)
            if not some:
                raise EOFError
            pending += some
        return bytes(pending)

    def _ending(self) -> str:
        """Describe how the child ended."""
        assert self._process is not None
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its socket and was killed"
        if code >= 0:
            return f"ended with code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def _reap(self) -> None:
        assert self._process is not None
        if self._control is not None:
            self._control.close()
            self._control = None
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)


def _python_path() -> str:
    """Return a PYTHONPATH on which the child finds the same `trainer` as this process, whatever the working folder."""
    folder = str(Path(trainer.__file__).resolve().parent.parent)
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
