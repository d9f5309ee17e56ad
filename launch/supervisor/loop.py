"""Start, wait, decide, start again. Standard library and Python 3.9 only: Slurm's batch script carries this file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from launch.supervisor.executor import Executor, Journal, Superseded, TemporarilyUnavailable
from launch.supervisor.policy import (
    FINAL,
    LOST_RUN,
    PEERS,
    REQUEUE,
    Decision,
    ExtraNodes,
    Growth,
    Launch,
    Requeue,
    RestartPolicy,
    Start,
    Stop,
    Wait,
    final_decision,
    grows_at,
    growth,
    leaving_nodes,
    next_decision,
    untrusted_nodes,
)

POLL_S = 5.0
"""Seconds between two looks at missing nodes, or at the run's store."""
GROW_POLL_S = 30.0
"""Seconds between two looks for nodes with which a running launch could be larger."""
MAX_WAIT_S = 6 * 3600.0
MAX_IDLE_ALLOCATION_S = 900.0
"""How long the nodes of a scheduler are held while nothing trains on them."""
JITTER = random.SystemRandom().random


def supervise(
    executor: Executor,
    journal: Journal,
    policy: RestartPolicy,
    log: Callable[[str], None],
    *,
    max_wait_s: float = MAX_WAIT_S,
    clock: Callable[[], float] = time.time,
    jitter: Callable[[], float] = JITTER,
) -> Stop | Requeue:
    """Keep the run going until it is done, or nothing here can bring it on."""
    waiting_for, since = "", None
    grown: Growth | None = None
    may_grow = True
    while True:
        number = None
        try:
            history, stop = journal.read()
            stop = stop or executor.stop_reason()
            # A run that has ended does not wait for a scheduler that does not answer.
            decision: Decision | None = final_decision(policy, history, clock(), stop)
            # A run that was requested anew meanwhile has no history.
            ended = history[-1].code if history else REQUEUE
            if decision is None and grown is not None and ended != REQUEUE:
                log(f"the launch that made way ended with {ended}, perhaps without its save: no other will")
                grown, may_grow = None, False
            if decision is None and grown is not None and grown.requeue:
                without = leaving_nodes(history, clock()) | untrusted_nodes(policy, history, clock())
                decision = Requeue(tuple(sorted(without)), f"the run goes on with {grown.size} nodes if it gets them")
            decision = decision or next_decision(
                policy,
                history,
                executor.healthy_nodes(),
                clock(),
                launcher_id=journal.launcher_id,
                jitter=jitter(),
                stop=stop,
            )
            if isinstance(decision, Start) and _announce_and_pause(executor, decision, log):
                number = journal.begin(decision.nodes, decision.idle)
        except TemporarilyUnavailable as error:
            decision = Wait(str(error))
        except Superseded:
            return Stop(LOST_RUN, FINAL[LOST_RUN])
        if isinstance(decision, (Stop, Requeue)):
            return decision
        if number is not None and isinstance(decision, Start):
            waiting_for, since = "", None
            watch = GrowthWatch(executor, policy, history, decision.nodes, journal.launcher_id, log, clock)
            code = _run_launch(executor, journal, number, decision.nodes, watch if may_grow else None, log)
            grown = watch.growth
            if code == LOST_RUN:
                # The run's new owner has ended this launch's record, and begun one of its own.
                return Stop(LOST_RUN, FINAL[LOST_RUN])
        if isinstance(decision, Wait):
            if executor.stop_reason():
                return Stop(REQUEUE, executor.stop_reason())
            since = clock() if since is None else since
            if waiting_for != decision.why:
                log(f"{decision.why}; waiting for at most {_hours(max_wait_s)}{_cost_of_waiting(policy, decision)}")
                waiting_for = decision.why
            if policy.scheduler_can_replace_nodes and clock() - since > MAX_IDLE_ALLOCATION_S:
                return Requeue((), decision.why)
            if clock() - since > max_wait_s:
                return Stop(PEERS, f"{decision.why}, for {_hours(max_wait_s)}; fix: go on later with --resume")
            executor.sleep(POLL_S)


def _hours(seconds: float) -> str:
    return "1 hour" if seconds == 3600 else f"{seconds / 3600:.3g} hours"


def _cost_of_waiting(policy: RestartPolicy, wait: Wait) -> str:
    """Return what to add to the line about a wait during which rented nodes do nothing."""
    if not policy.nodes_are_rented or wait.idle == 0:
        return ""
    count = "all nodes" if wait.idle is None else "1 node" if wait.idle == 1 else f"{wait.idle} nodes"
    return f"; {count} idle, and paid for"


def _announce_and_pause(executor: Executor, start: Start, log: Callable[[str], None]) -> bool:
    """Log why the run starts again, and pause; False where this process had to end meanwhile."""
    pause = f" in {start.after_s:.0f} s" if start.after_s else ""
    if start.why:
        log(f"{start.why}: starting again{pause} on {', '.join(start.nodes)}")
    if start.idle:
        why = "a step has too few micro-batches for their ranks, or they make up no whole replica of the model"
        log(f"idle, and paid for: {', '.join(start.idle)}; {why}")
    if start.after_s:
        executor.sleep(start.after_s)
    return not executor.stop_reason()


class GrowthWatch:
    """Looks, while a launch runs, whether the run could go on with more nodes: twice in a row, for its restart costs."""

    def __init__(
        self,
        executor: Executor,
        policy: RestartPolicy,
        history: Sequence[Launch],
        running: Sequence[str],
        launcher_id: str,
        log: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._executor, self._policy, self._history, self._running = executor, policy, history, running
        self._launcher_id, self._log, self._clock = launcher_id, log, clock
        self._next_look = grows_at(policy, history, running, clock())
        self._possible = False
        """Whether the last look saw a larger size, too: nodes of others are idle for a moment while these restart."""
        self.growth: Growth | None = None
        """Why the launch was ended; None where that was not for its growth."""

    def should_end(self) -> bool:
        """Whether the launch shall save and end, which is logged once."""
        now = self._clock()
        if self.growth is not None or self._next_look is None or now < self._next_look:
            return self.growth is not None
        try:
            extra = self._executor.extra_nodes(self._running)
        except TemporarilyUnavailable:
            extra = ExtraNodes()
        # A look may itself have taken a while, in which the launch was not followed.
        self._next_look = self._clock() + GROW_POLL_S
        larger = growth(self._policy, self._history, self._running, extra, now, launcher_id=self._launcher_id)
        self.growth, self._possible = larger if self._possible else None, larger is not None
        if self.growth is not None:
            starts = [launch.start_s for launch in self._history if launch.start_s]
            cost = f", about {starts[-1]:.0f} s" if starts else ""
            self._log(f"{self.growth.why}; it costs one restart{cost}")
        return self.growth is not None


def _run_launch(
    executor: Executor,
    journal: Journal,
    number: int,
    nodes: Sequence[str],
    watch: GrowthWatch | None,
    log: Callable[[str], None],
) -> int:
    """Run a launch that has been recorded, record its end, and return its exit code; without a `watch` it makes no way."""
    should_end = watch.should_end if watch else lambda: False
    # A stop that came while the record was written ends it before a rank starts.
    code = REQUEUE if executor.stop_reason() else executor.run_launch(number, nodes, should_end)
    grown = watch.growth if watch and code == REQUEUE and not executor.stop_reason() else None
    try:
        journal.finish(number, code, grown.size if grown else 0)
    except TemporarilyUnavailable as error:
        # The next launcher closes it as one whose launcher is gone.
        log(f"the end of launch {number} is not recorded: {error}")
    return code
