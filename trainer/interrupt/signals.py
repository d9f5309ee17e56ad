"""SIGTERM, SIGUSR1 and the first Ctrl-C set a flag; nothing else happens in the handler.

torchrun, Kubernetes, Docker and systemd announce the end with SIGTERM; Slurm sends whichever signal `--signal` names,
usually USR1 (https://slurm.schedmd.com/sbatch.html#OPT_signal). Launchers like to send the same signal twice; the
repetition must neither kill the process nor start the save over, so the handlers stay until `close()`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from trainer.interrupt.notice import Notice

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INSISTENT_S = 1.0
"""A second Ctrl-C within this time is the same one: a terminal sends it to launcher and ranks, and launchers repeat it."""


class SignalFlag:
    """Turns the first watched signal into a Notice; install() and close() belong on the main thread (a rule of
    Python's).

    The handler takes no lock, prints nothing and only sets an attribute: it may run between any two bytecodes of the
    loop. While the main thread sits in a long C call (a collective, a compilation) Python's handler waits, so the
    interpreter's C handler also writes the signal's number into a socket
    (https://docs.python.org/3/library/signal.html#signal.set_wakeup_fd) that the polling thread watches: the seconds
    of grace count from the arrival of the signal.
    """

    def __init__(self, grace_s: float, monotonic: Callable[[], float]) -> None:
        self.notice: Notice | None = None
        self._grace_s = grace_s
        self._monotonic = monotonic
        self._interrupted: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_fd = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)

    def install(self) -> None:
        self._previous = {watched: signal.signal(watched, self._handle) for watched in WATCHED}
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Signals that `trainer.__main__` blocked until now are delivered here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a signal arrives, `wake` is called, or the time is over."""
        # Not select(2): it takes no descriptor over 1023, and a training process may have more.
        if self._poll.poll(timeout_s * 1000):
            for number in os.read(self._reader.fileno(), 4096):
                self._arrived(number)

    def wake(self) -> None:
        # A full pipe wakes its reader already.
        with suppress(BlockingIOError):
            self._writer.send(b"\0")

    def close(self) -> None:
        """Put the previous handlers back. Harmless when never installed."""
        if self._previous:
            signal.set_wakeup_fd(self._previous_fd)
            for watched, handler in self._previous.items():
                signal.signal(watched, handler)
            self._previous = {}
        self._reader.close()
        self._writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = self._monotonic()
            if self._interrupted is not None and now - self._interrupted > INSISTENT_S:
                raise KeyboardInterrupt  # the user does not want to wait for the save
            self._interrupted = self._interrupted or now
        self._arrived(number)

    def _arrived(self, number: int) -> None:
        if self.notice is None and number in WATCHED:
            self.notice = Notice("signal", signal.Signals(number).name, self._monotonic() + self._grace_s)
