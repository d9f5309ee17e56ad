"""All sources of notices, polled by one thread, behind one cheap call."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lustrain.background import BackgroundThread
from lustrain.problem import UserError
from trainer.config import InterruptConfig
from trainer.interrupt.deadline import Deadline
from trainer.interrupt.metadata import Metadata, endpoint_problems
from trainer.interrupt.notice import Notice, OnEvent, Poller, nearer, to_announce
from trainer.interrupt.queue import QueueReader, asset_tag, queue_problems
from trainer.interrupt.signals import SignalFlag
from trainer.interrupt.stopfile import StopFile, stop_uri_problems

log = logging.getLogger(__name__)

LONGEST_JOIN_S = 5.0
"""How long close() waits for a poll under way; the thread is a daemon and may be left behind in a hanging request."""


def config_problems(config: InterruptConfig, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Check what the types of `[interrupt]` do not; one line a problem."""
    problems = [] if config.stop_uri is None else stop_uri_problems(config.stop_uri)
    problems += endpoint_problems(environ) if config.metadata else []
    problems += queue_problems(config.queue) if config.queue else []
    return problems


class NoticeWatcher:
    """Looks at every configured source every `poll_s` seconds from one daemon thread, and answers `notice()` at once.

    Signals are watched on every rank, the metadata service by local rank 0 of each node (notices concern a node), the
    stop file and the deadline by rank 0, which also reads the interruption queue after `read_queue`; at a step boundary the
    ranks agree on the notices of all of them. The first notice stays, unless a later one leaves less time; rank 0 reports it
    once, with `on_event("notice", Notice.fields())`. `wall_clock` returns Unix seconds for the deadline, None while it cannot;
    the polling thread calls it until it returns a time, once: `ObjectStore.now` fits. `local_clock` is this machine's own, by
    which times in notices are read, and `monotonic` the one of `Notice.deadline`. `on_event("warning", {"source", "detail"})`
    reports sources that do not answer.
    Raises UserError for an impossible config.
    """

    def __init__(
        self,
        config: InterruptConfig,
        *,
        rank: int = 0,
        local_rank: int = 0,
        on_event: OnEvent | None = None,
        environ: Mapping[str, str] = os.environ,
        wall_clock: Callable[[], float | None] = time.time,
        local_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        problems = config_problems(config, environ)
        if problems:
            raise UserError(problems)
        on_event = self._on_event = on_event or _log_event
        self._poll_s = config.poll_s
        self._local_clock, self._monotonic = local_clock, monotonic
        self._signals = SignalFlag(config.signal_grace_s, monotonic)
        self._pollers: list[Poller] = []
        self._metadata: Metadata | None = None
        if config.metadata and local_rank == 0:
            self._metadata = Metadata(
                environ, rebalance=config.rebalance, wall_clock=local_clock, monotonic=monotonic, on_event=on_event
            )
            self._pollers.append(self._metadata)
        if config.deadline is not None and rank == 0:
            self._pollers.append(
                Deadline(
                    config.deadline,
                    config.deadline_margin_s,
                    wall_clock=wall_clock,
                    monotonic=monotonic,
                    on_event=on_event,
                )
            )
        if config.stop_uri is not None and rank == 0:
            self._pollers.append(StopFile(config.stop_uri, on_event))
        self._polled: Notice | None = None
        self._config = config
        self._queue: QueueReader | None = None
        self._rank = rank
        self._announced: list[Mapping[str, Any]] = []
        self._announcing = threading.Lock()
        self._closing = threading.Event()
        self._thread = BackgroundThread(self._run, "interrupt-watch")

    def start(self) -> None:
        """Install the signal handlers and begin to poll; call it once, on the main thread."""
        self._signals.install()
        self._thread.start()

    def notice(self) -> Notice | None:
        """Return the notice to act on: a few attribute reads, no lock, no I/O. Raises a defect that ended the thread."""
        self._thread.check()
        return nearer(self._signals.notice, self._polled)

    def instance_id(self) -> str | None:
        """Return the id of this EC2 instance; None where neither its metadata nor its firmware says it."""
        return (self._metadata and self._metadata.instance_id()) or asset_tag()

    def read_queue(self, nodes: Mapping[str, str]) -> None:
        """Read the interruption queue from now on, on rank 0; `nodes` has the host of each instance of the run."""
        assert self._config.queue, "there is a queue"
        if not nodes:
            why = "no node of the run knows the id of its instance, so the interruption queue is not read"
            self._on_event("warning", {"source": "queue", "detail": f"{why}; fix: interrupt.metadata = true"})
            return
        self._queue = QueueReader(
            self._config.queue,
            nodes,
            rebalance=self._config.rebalance,
            on_notice=self._report,
            on_event=self._on_event,
            wall_clock=self._local_clock,
            monotonic=self._monotonic,
        )
        self._queue.start()
        self._pollers.append(self._queue)

    def report_notice(self, notice: Mapping[str, Any]) -> None:
        """Report on rank 0, once each, what stops the job (`Notice.fields`) and what else AWS takes away.

        The watching thread reports this rank's notice at once, the loop those of other ranks.
        """
        with self._announcing:
            known = [*self._announced, {**notice}]
            if self._rank != 0 or len(to_announce(known)) == len(self._announced):
                return
            self._announced = known
        summary = Notice(notice["source"], notice["detail"], None).summary
        where = f" on {notice['host']}" if notice["instance_id"] else ""
        self._on_event("notice", {**notice, "detail": f"{summary}{where}: saving after this step"})

    def close(self, *, saved: bool = True) -> None:
        """Stop polling and put the previous signal handlers back: call it after the last commit, not before.

        Unless the run has `saved`, messages that it acted on stay in the interruption queue.
        """
        self._closing.set()
        if self._queue is not None:
            self._queue.close(saved=saved)
        if self._thread.is_alive():
            self._signals.wake()
            self._thread.join(LONGEST_JOIN_S)
        self._signals.close()

    def __enter__(self) -> NoticeWatcher:
        self.start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(saved=kind is None)

    def look(self) -> None:
        """Look at every source once, and report what is new, as the watching thread does every `poll_s` seconds."""
        for poller in self._pollers:
            self._announce_any()
            self._polled = nearer(self._polled, poller.poll())
        if not self._closing.is_set():
            self._announce_any()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.look()
            if not self._closing.is_set():
                self._signals.wait(self._poll_s)

    def _announce_any(self) -> None:
        notice = nearer(self._signals.notice, self._polled)
        if notice is not None:
            self._report(notice)

    def _report(self, notice: Notice) -> None:
        self.report_notice(notice.fields(self._monotonic, self._local_clock))


def _log_event(kind: str, fields: dict[str, Any]) -> None:
    log.warning("%s: %s", kind, ", ".join(f"{key}: {value}" for key, value in fields.items()))
