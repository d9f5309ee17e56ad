"""Start, wait, decide, start again. Standard library and Python 3.9 only: Slurm's batch script carries this file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from launch.supervise.decision import FINAL, LOST_RUN, PEERS, Attempt, Requeue, Rules, Start, Stop, Wait, decide

POLL_S = 5.0
"""Between two looks at what is missing: nodes, or the run's store."""
GIVE_UP_S = 6 * 3600.0
DRAW = random.SystemRandom().random


class NotNow(Exception):
    """The run's journal or the scheduler does not answer just now; the text says why."""


class Journal(Protocol):
    """The attempts at a run, as the run keeps them. Every method raises NotNow."""

    by: str
    """Who starts attempts here, as it is recorded."""

    def read(self) -> tuple[list[Attempt], str]:
        """Return all attempts that have ended, and why no further one is wanted (empty: one is)."""
        ...

    def begin(self, nodes: Sequence[str]) -> int:
        """Note that an attempt begins, and return its number."""
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
    lacking, since = "", 0.0
    while True:
        try:
            move = _next(backend, journal, rules, clock(), draw())
        except NotNow as error:
            move = Wait(str(error))
        if isinstance(move, (Stop, Requeue)):
            return move
        if isinstance(move, Wait):
            if backend.told():
                return Stop(PEERS, backend.told())
            if lacking != move.why:
                say(f"{move.why}; waiting for at most {give_up_s / 3600:.3g} hours")
                lacking, since = move.why, since or clock()
            if clock() - since > give_up_s:
                return Stop(PEERS, f"{move.why}, for {give_up_s / 3600:.3g} hours")
            backend.rest(POLL_S)
            continue
        lacking, since = "", 0.0
        if _attempt(backend, journal, move, say) == LOST_RUN:
            # Whoever took the run over has ended this attempt's record, and begun one of its own.
            return Stop(LOST_RUN, FINAL[LOST_RUN])


def _next(backend: Backend, journal: Journal, rules: Rules, now: float, draw: float) -> Start | Wait | Requeue | Stop:
    history, stop = journal.read()
    return decide(rules, history, backend.living(), now, by=journal.by, draw=draw, stop=stop or backend.told())


def _attempt(backend: Backend, journal: Journal, move: Start, say: Callable[[str], None]) -> int | None:
    """Make an attempt, recorded before and after; returns its exit code, None where it was not made."""
    pause = f" in {move.after_s:.0f} s" if move.after_s else ""
    if move.why:
        say(f"{move.why}: starting again{pause} on {', '.join(move.nodes)}")
    if move.after_s:
        backend.rest(move.after_s)
        if backend.told():
            return None
    try:
        number = journal.begin(move.nodes)
    except NotNow as error:
        say(str(error))
        backend.rest(POLL_S)
        return None
    code = backend.run(number, move.nodes)
    try:
        journal.finish(number, code)
    except NotNow as error:
        # Its successor finds no end of it, and takes it for one whose launcher is gone.
        say(f"the end of attempt {number} is not recorded: {error}")
    return code
