"""What processes run, and waiting for what they bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def alive(pid: int) -> bool:
    """Runs; a process that has ended and is not waited for yet runs no more."""
    return state(pid) not in ("Z", "")


def state(pid: int) -> str:
    """The letter that proc_pid_stat(5) has for a process, as "T" where it is stopped; "" once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


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


def pending(pid: int, number: int) -> bool:
    """Whether a process has been sent a signal that it has not taken yet; False once it is gone."""
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = [int(row.split()[1], 16) for row in rows if row.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def wait_until(holds: Callable[[], object], seconds: float = 300) -> None:
    """Until something holds; AssertionError where it does not come about."""
    wait_for(holds, seconds=seconds)


def wait_for(look: Callable[[], T], holds: Callable[[T], object] = bool, seconds: float = 300) -> T:
    """Look until what is seen holds, and return that; AssertionError where it does not come about."""
    end = time.monotonic() + seconds
    while not holds(seen := look()):
        assert time.monotonic() < end, f"did not come about within {seconds} s; seen last: {seen!r:.500}"
        time.sleep(0.01)
    return seen
