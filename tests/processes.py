"""Whether a process runs, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Runs; a process that has ended and is not waited for yet runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Until something holds; AssertionError where it does not come about."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"did not come about within {seconds} s"
        time.sleep(0.01)
