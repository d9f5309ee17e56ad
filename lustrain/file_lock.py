"""Locks on files. The kernel frees them when the process that holds them ends, even by SIGKILL."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(path: Path) -> Iterator[int]:
    """Lock the file at `path` for this process, as soon as no other one holds it; yield its descriptor. OSError.

    The file is made where it is missing, and may be renamed or removed inside.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The last holder of the lock may have renamed or removed the file while this process waited.
            if _inode(path) == os.fstat(descriptor).st_ino:
                yield descriptor
                return
        finally:
            os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for as long as it is open; False where another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
