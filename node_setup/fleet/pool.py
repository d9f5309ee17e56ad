"""Work on many nodes: bounded in parallel, within a time, in batches that stop where too many fail."""

from __future__ import annotations

import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath

from node_setup.answers import AgentResponse
from node_setup.fleet.faults import MISTAKE, NOT_BEGUN, RUNS_ON, STOPPED, TIMEOUT, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.protocol import Traffic
from node_setup.fleet.transport import Connections, Deadline

ANSWERED = "answered"
BEAT_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 3.0
"""A thread has so long to notice that its connection was closed."""


@dataclass(frozen=True)
class Outcome:
    """This is the outcome of one node: `answered`, or a kind of `faults` with why and what mends it; `status` is the
    agent's."""

    node: Node
    kind: str
    why: str = ""
    fix: str = ""
    status: int | None = None
    answer: AgentResponse | None = None
    log: tuple[str, ...] = ()
    seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def good(self) -> bool:
        return self.kind == ANSWERED and self.status in (0, 2)


@dataclass(frozen=True)
class Concurrency:
    """This says how many nodes are worked on at once, how many in a batch (0: all), the percentage of failures after which no
    further batch begins (None: never), and the seconds for one node and for all, on `clock`."""

    max_parallel: int = 32
    serial: int = 0
    fail_percent: float | None = None
    node_s: float = 300
    total_s: float = 3600
    clock: Callable[[], float] = time.monotonic

    @property
    def batch(self) -> int:
        """Return the size of a batch: where only a limit on failures is given, failures are counted after every `max_parallel`
        nodes."""
        return self.serial or (self.max_parallel if self.fail_percent is not None else 0)


Work = Callable[[Node, Deadline, Traffic], Outcome]
"""This is the work on one node. It raises Fault; any other exception is a mistake of ours, and becomes that node's outcome
too."""


def run(
    nodes: Sequence[Node],
    work: Work,
    connections: Connections,
    concurrency: Concurrency,
    report: Callable[[Outcome], None],
    beat: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Return an outcome a node, in their order; `report` is called with each as it comes, `beat` each second in between. Ctrl-C
    closes all connections, and what had been done by then is reported."""
    deadline = Deadline(concurrency.total_s, concurrency.clock)
    size = concurrency.batch or len(nodes)
    outcomes: dict[str, Outcome] = {}
    why = ""
    for begin in range(0, len(nodes), size or 1):
        if why:
            break
        batch = _Batch(nodes[begin : begin + size], work, connections, concurrency, deadline)
        try:
            batch.begin()
            batch.collect(outcomes, report, beat)
        except KeyboardInterrupt:
            with _ignore_interrupts():
                connections.stop()
                batch.collect_stopped(outcomes, report)
            why = "stopped by Ctrl-C"
        bad = sum(not outcome.good for outcome in outcomes.values())
        if not why and concurrency.fail_percent is not None and 100 * bad > concurrency.fail_percent * len(outcomes):
            why = f"{bad} of {len(outcomes)} nodes failed, more than {concurrency.fail_percent:g} %"
        if not why and not deadline.remaining():
            why = f"the {concurrency.total_s:g} s for all nodes are over"
    fix = "repair the failed nodes and run it again"
    return [outcomes.get(node.name) or Outcome(node, NOT_BEGUN, why, fix) for node in nodes]


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignore a second Ctrl-C while stopping: that takes bounded seconds, and a second one would lose the report."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Batch:
    """These nodes are worked on by threads of our own.

    They are daemons, unlike those of concurrent.futures, which are waited for at the end of the process: a name server
    that does not answer must not hold up the report.
    """

    def __init__(
        self, nodes: Iterable[Node], work: Work, connections: Connections, concurrency: Concurrency, deadline: Deadline
    ) -> None:
        self._nodes = list(nodes)
        self._waiting: queue.SimpleQueue[Node] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        self._work, self._connections, self._concurrency, self._deadline = work, connections, concurrency, deadline
        for node in self._nodes:
            self._waiting.put(node)

    def begin(self) -> None:
        for _ in range(min(len(self._nodes), self._concurrency.max_parallel)):
            threading.Thread(target=self._run, daemon=True).start()

    def collect(
        self, outcomes: dict[str, Outcome], report: Callable[[Outcome], None], beat: Callable[[], None]
    ) -> None:
        """Collect all outcomes of the batch; nodes whose threads do not come back within the deadline are given up."""
        self._take_outcomes(outcomes, report, self._deadline.remaining() + STOP_TIMEOUT_S, beat)
        for node in self._unfinished(outcomes):
            outcomes[node.name] = late = Outcome(
                node, TIMEOUT, f"the {self._concurrency.total_s:g} s for all nodes are over"
            )
            report(late)

    def collect_stopped(self, outcomes: dict[str, Outcome], report: Callable[[Outcome], None]) -> None:
        self._take_outcomes(outcomes, report, STOP_TIMEOUT_S, lambda: None)
        for node in self._unfinished(outcomes):
            outcomes[node.name] = Outcome(node, STOPPED, RUNS_ON)

    def _unfinished(self, outcomes: Mapping[str, Outcome]) -> list[Node]:
        return [node for node in self._nodes if node.name not in outcomes]

    def _take_outcomes(
        self, outcomes: dict[str, Outcome], report: Callable[[Outcome], None], seconds: float, beat: Callable[[], None]
    ) -> None:
        end = self._concurrency.clock() + seconds
        while self._unfinished(outcomes):
            left = max(0.0, end - self._concurrency.clock())
            try:
                outcome = self._done.get(timeout=min(left, BEAT_INTERVAL_S))
            except queue.Empty:
                if left <= BEAT_INTERVAL_S:
                    return
                beat()
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            outcomes[outcome.node.name] = outcome
            report(outcome)

    def _run(self) -> None:
        while True:
            try:
                node = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._done.put(self._outcome(node))
            except BaseException as error:  # noqa: BLE001 (a mistake of ours: the thread that waits raises it)
                self._done.put(error)
                return

    def _outcome(self, node: Node) -> Outcome:
        clock = self._concurrency.clock
        began, traffic = clock(), Traffic()
        if self._connections.stopped.is_set():
            return Outcome(node, NOT_BEGUN, "stopped by Ctrl-C")
        if not self._deadline.remaining():
            return Outcome(node, NOT_BEGUN, f"the {self._concurrency.total_s:g} s for all nodes are over")
        try:
            return self._work(node, Deadline(min(self._concurrency.node_s, self._deadline.remaining()), clock), traffic)
        except Fault as fault:
            seconds = clock() - began
            return Outcome(node, fault.kind, fault.why, fault.fix, seconds=seconds, traffic=traffic)
        except Exception as error:  # noqa: BLE001 (the others have their report, also of what was changed on them)
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} (in {last.name}, {PurePath(last.filename).name}:{last.lineno})"
            seconds = clock() - began
            return Outcome(node, MISTAKE, why, "report it with this line", seconds=seconds, traffic=traffic)
