"""The state of stand-in programs, as JSON files under a lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

VOLATILE = Path("/run/simulated")
LASTING = Path("/var/lib/simulated")


class Refusal(Exception):
    """This is the real program's complaint and its exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def refuse(message: str, status: int = 1) -> NoReturn:
    raise Refusal(message, status)


def hardware() -> dict[str, Any]:
    """Return the fields of `rehearsal.lab.hardware.Hardware`, as the node's disk image has them."""
    content: dict[str, Any] = json.loads((LASTING / "hardware.json").read_text())
    return content


def peek(name: str, folder: Path = VOLATILE) -> dict[str, Any]:
    """Return the state, read-only."""
    try:
        content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return {}
    return content


@contextmanager
def change(name: str, folder: Path = VOLATILE) -> Iterator[dict[str, Any]]:
    """Yield the state, written back when the block ends without an error; one program at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = peek(name, folder)
        yield state
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(folder / f"{name}.json")
