"""A program whose standard input and output are a connection, as a socket to close and a process to end.

paramiko's own ProxyCommand leaves the process behind after a failed handshake, and a zombie after a good one
(paramiko issues 1713 and 2470).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import PurePath
from urllib.parse import urlsplit

from lustrain.problem import is_page

STOP_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.01
LONGEST_WORD = 2000


class Proxy:
    """This is the running program; `socket` is our end of the connection. OSError where it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self._closing = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self.socket, theirs = socket.socketpair()
        try:
            # Its own session: Ctrl-C is ours to hand on, and all that it starts ends with it.
            self._process = subprocess.Popen(
                self.command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._said, start_new_session=True
            )
        except OSError:
            self.socket.close()
            self._said.close()
            raise
        finally:
            theirs.close()

    @property
    def ended(self) -> bool:
        # Not collected yet: until then its number, which is its group's as well, is not reused.
        seen = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is not None or os.waitid(os.P_PID, self._process.pid, seen) is not None

    def complaint(self) -> str:
        """Return the last line of its standard error, never of a page; empty where there is none."""
        size = os.fstat(self._said.fileno()).st_size
        text = os.pread(self._said.fileno(), LONGEST_WORD, max(0, size - LONGEST_WORD)).decode(errors="replace")
        if is_page(text):
            return "an HTML page came in place of an answer"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End the program and all that it started, and collect it; it may be called twice, from any thread."""
        with self._closing:
            if self._process.returncode is not None:
                return
            self.socket.close()
            _signal_group(self._process.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_TIMEOUT_S
            while not self.ended and time.monotonic() < end:
                time.sleep(POLL_INTERVAL_S)
            # Also for what it started, which may ignore SIGTERM and outlive it.
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._said.close()


def fix_of(command: Sequence[str]) -> str:
    """Return what to do where `command` complains: AWS on loopback is an emulation, whose machines run no sshd and no agent."""
    if PurePath(command[0]).name == "aws" and _on_loopback(os.environ.get("AWS_ENDPOINT_URL", "")):
        return "the nodes of the embedded AWS run nothing: `python -m rehearsal.lab` gives nodes, or unset AWS_ENDPOINT_URL"
    return "try the same by hand"


def _on_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
