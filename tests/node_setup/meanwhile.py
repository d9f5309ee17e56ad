"""What falls in the middle of a call: a command that is under way for as long as a test wants, and acts once it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tests.processes import wait_until


class Sleeper:
    """A command, and a Python program, that says when it has begun and goes on until `end`."""

    def __init__(self, folder: Path) -> None:
        self._mark, self._go = folder / "sleeper-begun", folder / "sleeper-goes-on"
        self._go.touch()
        self.command = f"touch {self._mark}; while [ -e {self._go} ]; do sleep 1; done"
        self.program = f"""
import os, time
open({str(self._mark)!r}, "w").close()
while os.path.exists({str(self._go)!r}):
    time.sleep(1)
"""

    def begun(self) -> bool:
        return self._mark.exists()

    def end(self) -> None:
        self._go.unlink(missing_ok=True)


def once(holds: Callable[[], object], act: Callable[[], object]) -> None:
    """Act, beside what goes on here, when something holds."""

    def wait() -> None:
        wait_until(holds)
        act()

    threading.Thread(target=wait, daemon=True).start()
