"""The lock that lets one agent at a time change a node. The kernel frees it when the process ends, even by SIGKILL."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from node_setup.agent import owned
from node_setup.agent.host import Host

POLL_S = 0.1


class BusyError(Exception):
    """Another agent held the lock for as long as we were ready to wait."""


class NoLockError(Exception):
    """The lock's file cannot be made: a read-only or full /run, or no root."""


@contextmanager
def hold(host: Host, wait_s: float, path: str = owned.LOCK) -> Iterator[int]:
    """Hold the node's lock inside; wait up to `wait_s` seconds for it. BusyError names the holder; NoLockError.

    `path` names another lock, for what must not happen twice at once but does not change the node.

    The value is the lock's descriptor: a process that has it holds the lock as well, such as a program that is changing the
    node and goes on when the agent that started it is killed.
    """
    descriptor = _open(host.path(path))
    try:
        _take(descriptor, time.monotonic() + wait_s)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        _note(descriptor, f"pid {os.getpid()} since {since}\n")
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readable for root only: a lock can be taken on any file that can be opened.
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise NoLockError(error.strerror) from error


def _take(descriptor: int, until: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() >= until:
            raise BusyError(_who(os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()))
        time.sleep(POLL_S)


def _who(holder: str) -> str:
    fix = "fix: run it again when that has ended"
    pid = holder.split(" ")[1] if holder.startswith("pid ") else ""
    if pid and not os.path.exists(f"/proc/{pid}"):
        return f"a program that a killed agent started still changes this node: {holder}; {fix}"
    return f"another agent changes this node: {holder or 'a process that has just begun'}; {fix}"


def _note(descriptor: int, holder: str) -> None:
    """Write who holds the lock; on a full disk the lock is held without a name."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
