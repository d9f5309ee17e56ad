"""A session with a node: run a command with its input, and get its output within a time."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fabric import Connection
from paramiko.ssh_exception import SSHException

from node_setup.fleet.faults import LOST, NO_ANSWER, RUNS_ON, STOPPED, TIMEOUT, Fault
from node_setup.fleet.proxy import Proxy

KEEPALIVE_S = 5
POLL_INTERVAL_S = 0.5
LONGEST_ANSWER = 16 << 20
PIECE = 1 << 16
STOP_TIMEOUT_S = 1.5
"""The agent of this machine has so long to stop by itself, before it is killed."""


@dataclass(frozen=True)
class Completed:
    """This is a command that ended; `status` is -1 where a signal ended it."""

    status: int
    out: bytes
    err: bytes


class Session(Protocol):
    """A session runs commands on a node: `execute` has a shell run `command` and raises Fault. `root`: commands run as root
    without sudo; `root_fix` is the fix where sudo refuses."""

    @property
    def root(self) -> bool: ...

    @property
    def root_fix(self) -> str: ...

    @property
    def user(self) -> str: ...

    def execute(self, command: str, stdin: bytes, seconds: float) -> Completed: ...

    def close(self) -> None: ...


class SshSession:
    """This is a Fabric connection with what belongs to it; closing it ends the program that carried it."""

    def __init__(self, connection: Connection, proxy: Proxy | None, stopped: threading.Event) -> None:
        self.connection = connection
        self.proxy = proxy
        self._stopped = stopped
        self._channel: Any = None

    @property
    def root(self) -> bool:
        return self.user == "root"

    @property
    def root_fix(self) -> str:
        return f"let {self.user} use sudo with NOPASSWD, or log in as root by --user"

    @property
    def user(self) -> str:
        return str(self.connection.user)

    def open(self, channel_s: float) -> None:
        """Connect, log in and open the first channel: what fails up to here may be tried again."""
        self.connection.open()
        transport = self.connection.transport
        transport.set_keepalive(KEEPALIVE_S)
        self._channel = transport.open_session(timeout=channel_s)

    def execute(self, command: str, stdin: bytes, seconds: float) -> Completed:
        end = time.monotonic() + seconds
        channel = None
        try:
            channel, self._channel = self._channel or self.connection.transport.open_session(timeout=seconds), None
            channel.settimeout(max(0.1, end - time.monotonic()))
            channel.exec_command(command)
            _send(channel, stdin)
            return self._listen(channel, end, seconds)
        except (OSError, EOFError, SSHException) as error:
            raise self._broken(error, seconds, end) from None
        finally:
            if channel is not None:
                channel.close()

    def close(self) -> None:
        # Not connection.close(), which leaves the socket of a connection open that never came up.
        self.connection.client.close()
        if self.proxy is not None:
            self.proxy.close()

    def _listen(self, channel: Any, end: float, seconds: float) -> Completed:
        out, err = bytearray(), bytearray()
        piece: bytes | None = None
        while piece != b"":
            left = end - time.monotonic()
            if left <= 0 or self._stopped.is_set():
                raise TimeoutError
            channel.settimeout(min(left, POLL_INTERVAL_S))
            try:
                piece = channel.recv(PIECE)
            except TimeoutError:
                # What the command left running may hold the output open forever; its own status says that it is done.
                piece = b"" if channel.exit_status_ready() and not channel.recv_ready() else None
            out += piece or b""
            while channel.recv_stderr_ready():
                err += channel.recv_stderr(PIECE)
            if len(out) + len(err) > LONGEST_ANSWER:
                raise Fault(NO_ANSWER, f"its output is longer than {LONGEST_ANSWER >> 20} MiB", "look at what it runs")
        channel.status_event.wait(max(POLL_INTERVAL_S, end - time.monotonic()))
        # paramiko's -1: the other side named no status. With the connection gone too, it is not known how the command ended.
        if channel.exit_status == -1 and not channel.get_transport().is_active():
            raise EOFError
        return Completed(channel.exit_status, bytes(out), bytes(err))

    def _broken(self, error: Exception, seconds: float, end: float) -> Fault:
        if self._stopped.is_set():
            # sshd lets a program without a terminal run on when its channel closes.
            return Fault(STOPPED, RUNS_ON, "run it again: completed steps are skipped")
        if isinstance(error, TimeoutError) or time.monotonic() >= end:
            return Fault(
                TIMEOUT, f"no answer within {seconds:.0f} s", "give it more --timeout, or find what hangs on the node"
            )
        message = " ".join(str(error).split()).rstrip(".") or "closed by the node"
        return Fault(LOST, f"the connection broke while it ran: {message}")


def _send(channel: Any, stdin: bytes) -> None:
    """Send all of the input, then its end. TimeoutError."""
    try:
        channel.sendall(stdin)
        channel.shutdown_write()
    except TimeoutError:
        raise
    except OSError:
        # A command may end without reading its input; its status says why, or that the connection is gone.
        return


class LocalSession:
    """This runs commands on this machine, without SSH; a stopped command is ended with all that it started."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped

    @property
    def root(self) -> bool:
        return os.geteuid() == 0

    @property
    def root_fix(self) -> str:
        return f"run all of it as root: sudo {Path(sys.argv[0]).absolute()} …"

    @property
    def user(self) -> str:
        return getpass.getuser()

    def execute(self, command: str, stdin: bytes, seconds: float) -> Completed:
        pipe = subprocess.PIPE
        process = subprocess.Popen(["sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        try:
            out, err = self._listen(process, stdin, seconds)
        except BaseException as error:
            gone = _end(process)
            if isinstance(error, TimeoutError):
                raise self._broken(seconds, gone) from None
            raise
        return Completed(process.returncode if process.returncode >= 0 else -1, out, err)

    def close(self) -> None:
        """Nothing stays open between commands."""

    def _listen(self, process: subprocess.Popen[bytes], stdin: bytes, seconds: float) -> tuple[bytes, bytes]:
        """Return its output until its end. TimeoutError when it is not waited for any longer."""
        end, left_to_send = time.monotonic() + seconds, stdin or None
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                return process.communicate(left_to_send, min(left, POLL_INTERVAL_S))
            except subprocess.TimeoutExpired:
                left_to_send = None
                if self._stopped.is_set() or left <= POLL_INTERVAL_S:
                    raise TimeoutError from None

    def _broken(self, seconds: float, gone: bool) -> Fault:
        if not self._stopped.is_set():
            return Fault(TIMEOUT, f"no answer within {seconds:.0f} s", "give it more --timeout")
        why = "stopped while it ran; its agent was ended" if gone else RUNS_ON
        return Fault(STOPPED, why, "run it again: completed steps are skipped")


def _end(process: subprocess.Popen[bytes]) -> bool:
    """Ask the command and all that it started to end, then kill what did not; return whether we were allowed to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _of_session(process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            except PermissionError:
                # Behind sudo it is root's.
                return False
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STOP_TIMEOUT_S)
    return True


def _of_session(leader: int) -> list[int]:
    """List the processes of the session that `leader` began; not its process group, since timeout(1) makes one of its own."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # After the name in parentheses: state, parent, group, session (proc(5)).
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                pids.append(int(path.parent.name))
    return pids
