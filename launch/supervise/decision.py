"""What follows when an attempt at a run has ended: one pure function, for every backend.

Standard library and Python 3.9 only: Slurm's batch script carries this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

DONE, USAGE, PEERS, REQUEUE, LOST_RUN = 0, 2, 75, 85, 86
"""Exit codes of a job; a test compares them with `trainer.errors`."""
INTERRUPTED = (None, PEERS, REQUEUE)
"""Something outside of the run ended it."""
FINAL = {USAGE: "the configuration is refused", LOST_RUN: "a newer job owns the run"}

MOST_WORTHLESS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
LEAVING_S, DAY_S = 600.0, 86_400.0
"""How long a node that got a notice is left out: a spot instance has two minutes
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html). Later, the name may be that of
its successor."""


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, once it has ended. Times are Unix seconds."""

    number: int
    nodes: tuple[str, ...]
    code: int | None = None
    """The job's exit code; None where whoever waited for it is gone."""
    ended: float = 0.0
    gained: int = 0
    """Steps between the checkpoint that it began from and its last one."""
    start_s: float | None = None
    """From its start to the end of its first step; None where it made none."""
    step_s: float | None = None
    blamed: tuple[str, ...] = ()
    """Nodes that fell silent, or whose ranks failed first."""
    noticed: tuple[str, ...] = ()
    """Nodes that AWS takes away."""
    said: str = ""
    """The line with which the first rank that failed ended."""
    by: str = ""
    """Who started it: the same text for all attempts in one allocation of nodes."""

    @property
    def worthless(self) -> bool:
        """Whether it committed no more steps than its own start cost."""
        if self.gained <= 0 or not self.step_s:
            return True
        return self.gained * self.step_s <= (self.start_s or 0.0)

    @property
    def counts(self) -> bool:
        """Whether it speaks against the run: a notice does not, nor a loss, as long as a node is known to be its reason."""
        lost = self.code in (None, PEERS) and (self.blamed or self.noticed)
        return self.worthless and not lost and self.code != REQUEUE


@dataclass(frozen=True)
class Rules:
    """What was asked for."""

    least: int = 1
    """Nodes without which it is not started."""
    most: int = 1
    ranks: int = 1
    """Of a node."""
    shares: int = 1
    """global_batch / micro_batch: a multiple of every world size that can be used."""
    keep_nodes: bool = False
    """Use nodes that were to blame twice."""
    others: bool = False
    """Whether a scheduler can give other nodes."""
    until: float | None = None
    """Unix seconds after which no attempt is begun: the capacity ends."""

    def size(self, there: int) -> int:
        """Return how many of `there` nodes can be used; 0 where they are too few."""
        sizes = range(self.least, min(self.most, there) + 1)
        return max((nodes for nodes in sizes if self.shares % (nodes * self.ranks) == 0), default=0)


@dataclass(frozen=True)
class Start:
    """Start the ranks on these nodes, after a pause."""

    nodes: tuple[str, ...]
    after_s: float = 0.0
    why: str = ""
    idle: tuple[str, ...] = ()
    """Nodes that are there and would be used, were there a world of that size."""


@dataclass(frozen=True)
class Wait:
    """Too few nodes: look again."""

    why: str


@dataclass(frozen=True)
class Requeue:
    """Give the job back to the scheduler, without these nodes."""

    without: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Stop:
    code: int
    why: str


Move = Union[Start, Wait, Requeue, Stop]


def decide(
    rules: Rules,
    history: Sequence[Attempt],
    living: Sequence[str],
    now: float,
    *,
    by: str = "",
    draw: float = 1.0,
    stop: str = "",
) -> Move:
    """Return what to do next with a run of which no attempt is alive.

    `history` is all attempts so far, oldest first; `living` are the nodes at hand, the first ones first; `draw`, 0 to 1,
    spreads the pauses of runs that failed together. `by` is who asks; `stop` says why no further attempt is wanted.
    """
    last = history[-1] if history else None
    end = over(rules, history, now, stop)
    if end is not None:
        return end
    leaving = {node for one in history if now - one.ended < LEAVING_S for node in one.noticed}
    out = leaving | (_silent(history, by, now) if rules.others else set())
    at_hand = [node for node in living if node not in out]
    # A node that is bad for some reason is better than a run that waits for ever.
    well = [node for node in at_hand if rules.keep_nodes or node not in guilty(history, now)]
    chosen = well if rules.size(len(well)) else at_hand
    size = rules.size(len(chosen))
    if size:
        idle = tuple(chosen[size : rules.most])
        return Start(tuple(chosen[:size]), _pause(history, draw), _asked(last), idle)
    have = f"{len(at_hand)} of {rules.least} nodes are there"
    why = f"{have}; left out: {', '.join(sorted(out))}" if out else have
    if rules.others:
        return Requeue(tuple(sorted(leaving)), why)
    return Wait(why)


def over(rules: Rules, history: Sequence[Attempt], now: float, stop: str = "") -> Stop | None:
    """Return why no further attempt is made, whatever nodes there are; None where one is."""
    end = _end(history, history[-1]) if history else None
    if end is not None:
        return end
    if stop:
        return Stop(REQUEUE, stop)
    if rules.until is not None and now >= rules.until:
        return Stop(REQUEUE, "its capacity ends, by interrupt.deadline")
    return None


def guilty(history: Sequence[Attempt], now: float) -> set[str]:
    """Return the nodes that were to blame twice within a day; later, a name may be that of another machine."""
    blame = Counter(node for one in history if now - one.ended < DAY_S for node in set(one.blamed))
    return {node for node, times in blame.items() if times >= 2}


def _silent(history: Sequence[Attempt], by: str, now: float) -> set[str]:
    """Return the nodes that this allocation lost: a scheduler may need minutes to see it. One that it gives to a new
    allocation counts as well again."""
    lost = [one for one in history if one.by == by and one.code in (None, PEERS) and now - one.ended < LEAVING_S]
    return {node for one in lost for node in one.blamed}


def without_progress(history: Sequence[Attempt]) -> int:
    """Count the attempts at the end of the history that were worth nothing, whatever the reason."""
    count = 0
    for one in reversed(history):
        if not one.worthless:
            break
        count += 1
    return count


def _end(history: Sequence[Attempt], last: Attempt) -> Stop | None:
    if last.code == DONE:
        return Stop(DONE, "all steps are done")
    if last.code in FINAL:
        said = f": {last.said}" if last.said else ""
        return Stop(int(last.code or 0), f"{FINAL[int(last.code or 0)]}{said}")
    against = 0
    for one in reversed(history):
        if not one.worthless:
            break
        against += one.counts
    if against >= MOST_WORTHLESS:
        said = f"; the last one said: {last.said}" if last.said else ""
        why = f"{against} attempts in a row committed no more than their own start cost"
        # A code that asks to be started again would have the scheduler do just that.
        code = 1 if last.code in INTERRUPTED else int(last.code or 1)
        return Stop(code, f"{why}{said}; fix: look at the log of attempt {last.number}")
    return None


def _pause(history: Sequence[Attempt], draw: float) -> float:
    """5, 10, 20 … 300 s, halved by chance; an interruption costs none, if it is not one of several without progress."""
    if not history:
        return 0.0
    tried = without_progress(history)
    if history[-1].counts or history[-1].code not in INTERRUPTED:
        tried = max(1, tried)
    else:
        tried -= 1
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tried - 1, 30)) * (0.5 + draw / 2) if tried > 0 else 0.0


def _asked(last: Attempt | None) -> str:
    if last is None:
        return ""
    if last.noticed:
        return f"AWS takes {', '.join(last.noticed)} away"
    if last.blamed and last.code in (None, PEERS):
        return f"{', '.join(last.blamed)} was lost"
    if last.code is None:
        return "whoever waited for the last attempt is gone"
    return f"the last attempt ended with {last.code}"


def attempt(record: Mapping[str, Any]) -> Attempt:
    """Return the attempt that a record of the run's journal describes."""
    names = ("code", "gained", "start_s", "step_s", "said", "by")
    known = {name: record[name] for name in names if record.get(name) is not None}
    return Attempt(
        number=record["attempt"],
        nodes=tuple(record["nodes"]),
        ended=record.get("ended") or 0.0,
        blamed=tuple(record.get("blamed") or ()),
        noticed=tuple(record.get("noticed") or ()),
        **known,
    )
