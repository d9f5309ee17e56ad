"""Reactions of a process to the end of its parent, its launcher or the reader of its output. Linux only."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from typing import Any

from lustrain.problem import UserError, problem

LAUNCHER = "LUSTRAIN_LAUNCHER"
"""Variable with the process id of the launcher that a rank must not outlive; the rank takes it out of its environment."""

_PR_SET_PDEATHSIG = 1
"""https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html: the parent is the *thread* that started the process."""
_POLL_S = 0.5
_launcher: int | None = None


def die_with_parent(parent: int) -> bool:
    """Have the kernel kill this process when `parent` ends; False when it has ended already, and the caller must exit.

    Call it on the main thread: the kernel ties the signal to the calling thread.
    """
    _signal_at_parents_end(signal.SIGKILL)
    return os.getppid() == parent


def die_with_launcher() -> bool:
    """Do the same with the launcher in the environment; True where there is none. UserError for what is not a process id."""
    global _launcher
    value = os.environ.pop(LAUNCHER, None)
    if value and not value.isdecimal():
        raise UserError(problem(LAUNCHER, value, "is not a process id", fix=f"unset {LAUNCHER}: the launcher sets it"))
    _launcher = int(value) if value else None
    return _launcher is None or die_with_parent(_launcher)


def signal_when_orphaned(grace_s: float) -> None:
    """Send this process SIGTERM when its launcher ends, so that training saves and stops, and SIGKILL `grace_s` seconds later.

    Call it on the main thread, once this process handles SIGTERM. SIGKILL is needed because a rank may wait for another
    one forever. Does nothing without a launcher.
    """
    if _launcher is not None:
        _signal_at_parents_end(signal.SIGTERM)
        watch = threading.Thread(
            target=_kill_when_orphaned, args=(_launcher, grace_s), name="launcher-watch", daemon=True
        )
        watch.start()


class _Output(io.FileIO):
    """A file that takes everything: what is written once its reader is gone is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            drop_output(self.fileno())
            return memoryview(data).nbytes


def ignore_closed_stdout() -> None:
    """Go on when the reader of standard output or error, like `head`, closes it: that is not an error.

    The default action of SIGPIPE would also end the process for a lost connection.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            output = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
            lines = stream.line_buffering or stream.write_through
            wrapped = io.TextIOWrapper(output, stream.encoding, stream.errors, line_buffering=lines)
            setattr(sys, name, wrapped)


def drop_output(descriptor: int) -> None:
    """Let a descriptor lead nowhere: Python would complain of a closed pipe again as it flushes at exit.

    https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _kill_when_orphaned(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _signal_at_parents_end(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
