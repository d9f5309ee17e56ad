"""The run's own log: every record becomes durable in the store without the loop ever waiting for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lustrain.background import BackgroundThread
from lustrain.backoff import pause_s
from lustrain.problem import UserError
from trainer.metrics.backlog import Backlog, Part
from trainer.metrics.records import EVENTS, STEPS, PartName, encode, utc_now
from trainer.storage import ObjectStore, PreconditionError

log = logging.getLogger(__name__)

MEMORY_BYTES = 8 << 20
PART_BYTES = 2 << 20
"""A part of an hour at ten steps per second is about 15 MB; parts of this size keep a single write short."""
SHORTEST_GAP_S = 1.0
"""Events ask for an upload at once; a burst of them shares one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""The pause after the first failed upload is at most the former, after any number of them at most the latter."""
CLOSE_TIMEOUT_S = 30.0


def append_event(store: ObjectStore, generation: int, kind: str, fields: Mapping[str, Any]) -> None:
    """Log one event as a part of its own, for a command beside a job; a job's log passes over parts that are not its own."""
    body = encode({**fields, "time": utc_now(), "event": kind, "attempt": generation})
    names = (PartName.of_key(info.key) for info in store.list(f"{EVENTS}{generation:06d}-"))
    _put_part(store, EVENTS, generation, 1 + max((name.part for name in names if name is not None), default=-1), body)


def _put_part(store: ObjectStore, prefix: str, generation: int, part: int, body: bytes) -> int:
    """Store a part under the first free number from `part` on and return the next one.

    A part that is already stored is an earlier try of ours whose answer was lost, or another writer's.
    """
    while True:
        try:
            store.swap(PartName(generation, part).key(prefix), body, None)
        except PreconditionError:
            part += 1
        else:
            return part + 1


class RunLog:
    """A Sink that stores steps and events of one lease generation as immutable parts, from one background thread.

    Parts go up every `flush_s`, and soon after an event. While the store fails, parts wait in memory, then in local
    files, and are tried again with growing pauses; a part keeps its bytes and its name until it is stored, so nothing
    is stored twice. Each outage is reported once through `on_trouble`. A process killed without warning loses at most
    what came since the last upload.
    """

    def __init__(
        self,
        store: ObjectStore,
        generation: int,
        flush_s: float,
        *,
        launch_attempt: int | None = None,
        memory_bytes: int = MEMORY_BYTES,
        part_bytes: int = PART_BYTES,
        on_trouble: Callable[[str], None] = log.warning,
    ) -> None:
        """`launch_attempt` is the launcher's number for this start (`trainer.environment`); every event then has it."""
        self._store = store
        self._generation = generation
        self._started_as = {} if launch_attempt is None else {"launch_attempt": launch_attempt}
        self._flush_s = flush_s
        self._on_trouble = on_trouble
        self._backlog = Backlog(memory_bytes, part_bytes)
        self._next_part = {STEPS: 0, EVENTS: 0}
        self._changed = threading.Condition()
        self._appended = 0
        self._stored = 0
        self._newest_step = 0
        self._requested = False
        self._waiting = 0
        self._closing = False
        self._failures = 0
        self._spool_reported = False
        self._thread = BackgroundThread(self._run, "run-log", on_defect=self._wake)
        self._thread.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Log a step; raises what ended the uploading thread, if a defect did."""
        self._thread.check()
        self._append(STEPS, encode({"time": utc_now(), **record}))
        with self._changed:
            self._newest_step = int(record["step"])
            if self._waiting:
                self._changed.notify_all()

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Log an event; the times, names and numbers of attempts are this log's own and win over equal names in `fields`."""
        own = {"time": utc_now(), "event": kind, "attempt": self._generation, **self._started_as}
        self._append(EVENTS, encode({**own, **fields, **own}), ask=True)

    def flush(self, timeout: float | None = CLOSE_TIMEOUT_S) -> bool:
        """Ask for an upload and wait until all earlier records are durable; False when `timeout` seconds did not
        suffice.

        0 only asks; None waits for as long as it takes.
        """
        with self._changed:
            target = self._appended
            self._requested = True
            self._waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._stored >= target or self._thread.defect is not None, timeout)
                return self._stored >= target
            finally:
                self._waiting -= 1

    def flush_step(self, step: int, timeout: float) -> bool:
        """Wait until the record of `step`, which may be yet to come, and all before it are durable; False as in `flush`."""
        end = time.monotonic() + timeout
        with self._changed:
            self._waiting += 1
            try:
                if not self._changed.wait_for(lambda: self._newest_step >= step or self._is_over, timeout):
                    return False
            finally:
                self._waiting -= 1
        return self.flush(max(0.0, end - time.monotonic()))

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Flush and stop; what the store did not take in `timeout` seconds is left in local files that the report names."""
        if self._closing:
            return
        durable = self.flush(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        with self._changed:
            if not durable and self._backlog.lines:
                folder = self._backlog.rescue()
                where = f"they are kept in {folder}" if folder else "and no local folder can be written either"
                why = f" ({self._thread.defect!r})" if self._thread.defect else ""
                self._on_trouble(f"{self._backlog.lines} log records are not in {self._store.uri}{why}; {where}")
            else:
                self._backlog.remove_folder()

    def _append(self, prefix: str, line: bytes, *, ask: bool = False) -> None:
        with self._changed:
            self._backlog.append(prefix, line)
            self._appended += 1
            spool_error = self._backlog.spool_error
            if ask:
                self._requested = True
                self._changed.notify_all()
        if spool_error is not None and not self._spool_reported:
            self._spool_reported = True
            self._on_trouble(f"log records pile up in memory: the temporary folder cannot be written ({spool_error})")

    @property
    def _is_over(self) -> bool:
        return self._closing or self._thread.defect is not None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requested or self._closing, self._pause_s())
                if self._closing:
                    return
                self._requested = False
            self._upload()
            self._pause_after_upload()

    def _pause_s(self) -> float:
        longest_s = min(self._flush_s, LONGEST_PAUSE_S)
        return pause_s(self._failures, FIRST_PAUSE_S, longest_s) if self._failures else self._flush_s

    def _pause_after_upload(self) -> None:
        """Leave a gap after an upload, unless someone waits for the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting > 0, min(SHORTEST_GAP_S, self._flush_s))

    def _upload(self) -> None:
        try:
            for prefix in (STEPS, EVENTS):
                while (part := self._head(prefix)) is not None:
                    number = self._next_part[part.prefix]
                    self._next_part[part.prefix] = _put_part(
                        self._store, part.prefix, self._generation, number, part.read()
                    )
                    self._note_stored(part)
        except (UserError, OSError) as error:
            self._failures += 1
            if self._failures == 1:
                self._on_trouble(f"the log cannot be stored and is kept on this machine until it can: {error}")
            return
        if self._failures:
            self._on_trouble(f"the log is stored again, after {self._failures} failed tries; nothing is missing")
        self._failures = 0

    def _head(self, prefix: str) -> Part | None:
        with self._changed:
            return self._backlog.head(prefix)

    def _note_stored(self, part: Part) -> None:
        with self._changed:
            self._backlog.drop_head(part.prefix)
            self._stored += part.lines
            self._changed.notify_all()
