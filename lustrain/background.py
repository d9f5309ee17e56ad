"""Background threads whose failure is raised where their work is used, and is never silent."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundThread(threading.Thread):
    """A daemon thread that keeps the exception that ended it, to be raised again by `check`."""

    def __init__(self, work: Callable[[], None], name: str, *, on_defect: Callable[[], None] | None = None) -> None:
        """`on_defect` is called in the thread, once `defect` is set: it may wake a thread that waits for the work."""
        super().__init__(name=name, daemon=True)
        self.defect: BaseException | None = None
        self._work, self._on_defect = work, on_defect

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 -- raised again by check()
            self.defect = error
            if self._on_defect is not None:
                self._on_defect()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self.defect is not None:
            raise self.defect
