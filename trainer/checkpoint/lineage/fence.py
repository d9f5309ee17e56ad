"""A watch on the lease between commits, so that the older of two jobs stops soon and not at its next save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lustrain.background import BackgroundThread
from lustrain.problem import UserError
from trainer.checkpoint.lineage.lease import Lease
from trainer.errors import LostRunError

LONGEST_JOIN_S = 5.0
"""How long close() waits for a read under way; the thread is a daemon and may be left behind in a hanging request."""


class Fence:
    """Re-reads the lease every `poll_s` seconds from a daemon thread; the commit checks it by itself, this is only sooner."""

    def __init__(self, lease: Lease, poll_s: float, on_event: Callable[[str, dict[str, Any]], None]) -> None:
        self._lost: LostRunError | None = None
        self._lease, self._poll_s, self._on_event = lease, poll_s, on_event
        self._closing = threading.Event()
        self._reported = False
        self._thread = BackgroundThread(self._run, "lease-fence")
        self._thread.start()

    @property
    def lost(self) -> LostRunError | None:
        """The error that a newer job owns the run, once it does; raises a defect that ended the thread."""
        self._thread.check()
        return self._lost

    def close(self) -> None:
        """Stop reading the lease."""
        self._closing.set()
        self._thread.join(LONGEST_JOIN_S)

    def _run(self) -> None:
        while not self._closing.wait(self._poll_s):
            try:
                self._lease.check()
                self._reported = False
            except LostRunError as error:
                self._lost = error
                return
            except UserError as error:
                # A store that does not answer for a while proves nothing about ownership; the commit checks again.
                if not self._reported:
                    self._on_event("warning", {"source": "lease", "detail": str(error)})
                    self._reported = True
