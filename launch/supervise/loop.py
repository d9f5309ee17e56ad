"""Start, wait, decide, start again. Standard library and Python 3.9 only: Slurm's batch script carries this file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from launch.supervise.decision import (
    FINAL,
    LOST_RUN,
    PEERS,
    REQUEUE,
    Attempt,
    Requeue,
    Rules,
    Start,
    Stop,
    Wait,
    decide,
    over,
)

POLL_S = 5.0
"""Between two looks at what is missing: nodes, or the run's store."""
GIVE_UP_S = 6 * 3600.0
HOLD_S = 900.0
"""How long nodes of a scheduler are held while nothing trains on them."""
DRAW = random.SystemRandom().random


class NotNow(Exception):
    """The run's journal or the scheduler does not answer just now; the text says why."""


class Overtaken(Exception):
    """Another launcher has begun an attempt at this run at the same moment."""


class Journal(Protocol):
    """The attempts at a run, as the run keeps them. Every method raises NotNow."""

    by: str
    """Who starts attempts here, as it is recorded."""

    def read(self) -> tuple[list[Attempt], str]:
        """Return the attempts since the run was asked for last, and why no further one is wanted (empty: one is).

        One without an end ends here: whoever waited for it is gone.
        """
        ...

    def begin(self, nodes: Sequence[str], idle: Sequence[str]) -> int:
        """Note that an attempt begins, which nodes are idle meanwhile, and return its number. Overtaken."""
        ...

    def finish(self, number: int, code: int) -> None:
        """Note how it ended."""
        ...


class Backend(Protocol):
    """What starts ranks on nodes."""

    def living(self) -> list[str]:
        """Return the nodes that can be used, the first ones first. NotNow."""
        ...

    def run(self, number: int, nodes: Sequence[str]) -> int:
        """Start the ranks, wait for all of them, and return the job's exit code."""
        ...

    def rest(self, seconds: float) -> None:
        """Sleep, but no longer than until a signal comes."""
        ...

    def told(self) -> str:
        """Return why this process was told to end; empty while it was not."""
        ...


def supervise(
    backend: Backend,
    journal: Journal,
    rules: Rules,
    say: Callable[[str], None],
    *,
    give_up_s: float = GIVE_UP_S,
    clock: Callable[[], float] = time.time,
    draw: Callable[[], float] = DRAW,
) -> Stop | Requeue:
    """Keep the run going until it is done, or nothing here can bring it on."""
    lacking, since = "", None
    while True:
        number = None
        try:
            history, stop = journal.read()
            stop = stop or backend.told()
            # A run that is over does not wait for a scheduler that does not answer.
            move = over(rules, history, clock(), stop) or decide(
                rules, history, backend.living(), clock(), by=journal.by, draw=draw(), stop=stop
            )
            if isinstance(move, Start) and _rested(backend, move, say):
                number = journal.begin(move.nodes, move.idle)
        except NotNow as error:
            move = Wait(str(error))
        except Overtaken:
            return Stop(LOST_RUN, FINAL[LOST_RUN])
        if isinstance(move, (Stop, Requeue)):
            return move
        if number is not None and isinstance(move, Start):
            lacking, since = "", None
            if _attempt(backend, journal, number, move.nodes, say) == LOST_RUN:
                # Whoever took the run over has ended this attempt's record, and begun one of its own.
                return Stop(LOST_RUN, FINAL[LOST_RUN])
        if isinstance(move, Wait):
            if backend.told():
                return Stop(REQUEUE, backend.told())
            since = clock() if since is None else since
            if lacking != move.why:
                say(f"{move.why}; waiting for at most {give_up_s / 3600:.3g} hours")
                lacking = move.why
            if rules.others and clock() - since > HOLD_S:
                return Requeue((), move.why)
            if clock() - since > give_up_s:
                return Stop(PEERS, f"{move.why}, for {give_up_s / 3600:.3g} hours; fix: go on later with --resume")
            backend.rest(POLL_S)


def _rested(backend: Backend, move: Start, say: Callable[[str], None]) -> bool:
    """Say why it starts again, and pause; False where this process was told to end meanwhile."""
    pause = f" in {move.after_s:.0f} s" if move.after_s else ""
    if move.why:
        say(f"{move.why}: starting again{pause} on {', '.join(move.nodes)}")
    if move.idle:
        size = len(move.nodes) + len(move.idle)
        say(f"idle, and paid for: {', '.join(move.idle)}; {size} nodes do not divide train.global_batch evenly")
    if move.after_s:
        backend.rest(move.after_s)
    return not backend.told()


def _attempt(backend: Backend, journal: Journal, number: int, nodes: Sequence[str], say: Callable[[str], None]) -> int:
    """Make an attempt that has been recorded, record its end, and return its exit code."""
    # Told while the record was written, it ends before a rank starts.
    code = REQUEUE if backend.told() else backend.run(number, nodes)
    try:
        journal.finish(number, code)
    except NotNow as error:
        # Its successor finds no end of it, and takes it for one whose launcher is gone.
        say(f"the end of attempt {number} is not recorded: {error}")
    return code
