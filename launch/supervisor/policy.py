"""What follows when a launch of a run has ended: one pure function, for every backend.

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
"""Codes of a launch that something outside of the run ended."""
FINAL = {USAGE: "the configuration is refused", LOST_RUN: "a newer job owns the run"}

MAX_FUTILE_LAUNCHES = 3
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 300.0
LEAVING_S, DAY_S = 600.0, 86_400.0
"""How long a node that got a notice is left out: a spot instance has two minutes
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html). Later, the name may be that of
its successor."""
GROW_AFTER_S, GROW_STARTS, GROW_AGAIN, GROW_AGAIN_S = 600.0, 20.0, 4.0, 60.0
"""A launch that makes way for a larger one has run for ten minutes at least, and for so many times what a start costs: about a
twentieth of the time is the most that growing may cost. After one that brought no more nodes, the next waits GROW_AGAIN times
as long, of GROW_AGAIN_S at least: `grow_after_s` may be 0, and the run must not restart in a loop."""


@dataclass(frozen=True)
class Launch:
    """One start of the ranks, after its end. Times are Unix seconds."""

    number: int
    nodes: tuple[str, ...]
    code: int | None = None
    """The job's exit code; None where its launcher is gone."""
    ended: float = 0.0
    gained: int = 0
    """Steps between the checkpoint that it resumed from and its last one."""
    start_s: float | None = None
    """Seconds from its start to the end of its first step; None where it made no step."""
    step_s: float | None = None
    blamed: tuple[str, ...] = ()
    """Nodes that fell silent, or whose ranks failed first."""
    noticed: tuple[str, ...] = ()
    """Nodes that AWS takes away."""
    error: str = ""
    """The line with which the first failed rank ended."""
    launcher_id: str = ""
    """Its launcher: the same text for all launches in one allocation of nodes."""

    @property
    def made_no_progress(self) -> bool:
        """Whether it committed no more steps than its own start cost."""
        if self.gained <= 0 or not self.step_s:
            return True
        return self.gained * self.step_s <= (self.start_s or 0.0)

    @property
    def counts_against_limit(self) -> bool:
        """Whether it counts as a futile launch: a notice does not, nor a loss that is blamed on a node."""
        lost = self.code in (None, PEERS) and (self.blamed or self.noticed)
        return self.made_no_progress and not lost and self.code != REQUEUE


@dataclass(frozen=True)
class RestartPolicy:
    """On which nodes a run is started again, and until when."""

    min_nodes: int = 1
    max_nodes: int = 1
    ranks_per_node: int = 1
    micro_batches_per_step: int = 1
    """global_batch / micro_batch: no more groups of `ranks_per_micro_batch` ranks than that can be used."""
    ranks_per_micro_batch: int = 1
    """Ranks that compute a micro-batch together (parallel.tensor)."""
    ranks_per_replica: int = 1
    """Ranks that share one copy of the model (parallel.shard x parallel.tensor): only multiples of them can be used."""
    allow_blamed_nodes: bool = False
    """Use nodes that were blamed twice."""
    scheduler_can_replace_nodes: bool = False
    nodes_are_rented: bool = False
    """Nodes cost money while nothing trains on them."""
    deadline: float | None = None
    """Unix seconds after which no launch begins, because the capacity ends."""
    grow_after_s: float | None = None
    """How long a launch runs before it makes way for one on more nodes; None: GROW_AFTER_S, or GROW_STARTS times its start."""

    @property
    def max_ranks(self) -> int:
        """Ranks for which a step has micro-batches."""
        return self.micro_batches_per_step * self.ranks_per_micro_batch

    def usable_nodes(self, available: int) -> int:
        """Return how many of the available nodes can be used; 0 where they are too few."""
        most = min(self.max_nodes, available, self.max_ranks // self.ranks_per_node)
        sizes = range(most, max(self.min_nodes, 1) - 1, -1)
        return next((nodes for nodes in sizes if nodes * self.ranks_per_node % self.ranks_per_replica == 0), 0)


@dataclass(frozen=True)
class Start:
    """Start the ranks on these nodes, after a pause."""

    nodes: tuple[str, ...]
    after_s: float = 0.0
    why: str = ""
    idle: tuple[str, ...] = ()
    """Available nodes that are left out: too few micro-batches for their ranks, or no whole replica."""


@dataclass(frozen=True)
class Wait:
    """Too few nodes: look again."""

    why: str
    idle: int | None = None
    """Usable nodes, which wait for the others; None where it is not known how many there are."""


@dataclass(frozen=True)
class Requeue:
    """Give the job back to the scheduler, without these nodes."""

    without: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Stop:
    code: int
    why: str


Decision = Union[Start, Wait, Requeue, Stop]


@dataclass(frozen=True)
class ExtraNodes:
    """Nodes that a running launch does not use and the next one could."""

    held: tuple[str, ...] = ()
    """The executor can start ranks there."""
    free: tuple[str, ...] = ()
    """A scheduler would give them to this job if it were requeued."""


@dataclass(frozen=True)
class Growth:
    """The running launch saves and ends, because the next one can have this many nodes."""

    size: int
    why: str
    requeue: bool = False
    """The scheduler has to give the job its nodes anew."""


def next_decision(
    policy: RestartPolicy,
    history: Sequence[Launch],
    healthy: Sequence[str],
    now: float,
    *,
    launcher_id: str = "",
    jitter: float = 1.0,
    stop: str = "",
) -> Decision:
    """Return what to do next with a run that has no launch alive.

    `history` is all launches so far, oldest first; `healthy` are the available nodes in the order of preference; `jitter`, 0
    to 1, spreads the pauses of runs that failed together. `launcher_id` is the caller's; `stop` says why the run should end.
    """
    final = final_decision(policy, history, now, stop)
    if final is not None:
        return final
    leaving = leaving_nodes(history, now)
    excluded = leaving | (
        recently_lost_nodes(history, launcher_id, now) if policy.scheduler_can_replace_nodes else set()
    )
    available = [node for node in healthy if node not in excluded]
    # A node that was blamed is better than a run that waits forever.
    untrusted = untrusted_nodes(policy, history, now)
    trusted = [node for node in available if node not in untrusted]
    chosen = trusted if policy.usable_nodes(len(trusted)) else available
    size = policy.usable_nodes(len(chosen))
    if size:
        idle = tuple(chosen[size : policy.max_nodes])
        return Start(tuple(chosen[:size]), _pause(history, jitter), restart_reason(history), idle)
    have = f"{len(available)} of {policy.min_nodes} nodes are there"
    why = f"{have}; left out: {', '.join(sorted(excluded))}" if excluded else have
    if policy.scheduler_can_replace_nodes:
        return Requeue(tuple(sorted(leaving)), why)
    return Wait(why, len(available))


def final_decision(policy: RestartPolicy, history: Sequence[Launch], now: float, stop: str = "") -> Stop | None:
    """Return why no further launch is made on any nodes; None where one is."""
    ended = _ended_by(history, history[-1]) if history else None
    if ended is not None:
        return ended
    if stop:
        return Stop(REQUEUE, stop)
    if policy.deadline is not None and now >= policy.deadline:
        return Stop(REQUEUE, "its capacity ends, by interrupt.deadline")
    return None


def growth(
    policy: RestartPolicy,
    history: Sequence[Launch],
    running: Sequence[str],
    extra: ExtraNodes,
    now: float,
    *,
    launcher_id: str = "",
) -> Growth | None:
    """Return on how many more nodes a run could go on than those of its running launch; None where it stays as it is.

    A larger size has to be usable: micro-batches for all ranks, and whole replicas of the model. Nodes that the next launch
    leaves out do not count, neither those that run nor others.
    """
    unfit = leaving_nodes(history, now) | untrusted_nodes(policy, history, now)
    # In a new allocation, a node that this one has lost counts as healthy.
    lost = recently_lost_nodes(history, launcher_id, now) if policy.scheduler_can_replace_nodes else set()
    kept = [node for node in running if node not in unfit]
    held = [node for node in extra.held if node not in {*running} | unfit | lost]
    free = [node for node in extra.free if node not in {*running, *held} | unfit]
    size = policy.usable_nodes(len(kept) + len(held))
    if size > len(running):
        names = ", ".join(held[: size - len(kept)])
        return Growth(size, f"{names} can be used: saving, to go on with {_nodes(size)} instead of {len(running)}")
    size = policy.usable_nodes(len(kept) + len(held) + len(free))
    if policy.scheduler_can_replace_nodes and size > len(running):
        names = ", ".join(free[: size - len(kept) - len(held)])
        why = f"{names} would be free: saving, and back to the queue for {_nodes(size)} instead of {len(running)}"
        return Growth(size, why, requeue=True)
    return None


def grows_at(policy: RestartPolicy, history: Sequence[Launch], running: Sequence[str], began: float) -> float | None:
    """Return the Unix time from which a launch that began then may make way for a larger one; None for never."""
    if len(running) >= policy.max_nodes:
        return None
    starts = [launch.start_s for launch in history[-3:] if launch.start_s]
    wait = max(GROW_AFTER_S, GROW_STARTS * max(starts, default=0.0))
    wait = wait if policy.grow_after_s is None else policy.grow_after_s
    size = len(running)
    for launch in reversed(history):
        # It was ended, not by a notice, and the one after it had no more nodes.
        if launch.code != REQUEUE or launch.noticed or size > len(launch.nodes):
            break
        wait, size = max(wait, GROW_AGAIN_S) * GROW_AGAIN, len(launch.nodes)
    # A restart shortly before the end of the capacity gains nothing.
    at = began + min(wait, DAY_S)
    return at if policy.deadline is None or at + wait < policy.deadline else None


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def leaving_nodes(history: Sequence[Launch], now: float) -> set[str]:
    """Return the nodes that AWS takes away."""
    return {node for launch in history if now - launch.ended < LEAVING_S for node in launch.noticed}


def untrusted_nodes(policy: RestartPolicy, history: Sequence[Launch], now: float) -> set[str]:
    """Return the nodes that are used only where a run could not go on without them."""
    return set() if policy.allow_blamed_nodes else repeatedly_blamed(history, now)


def repeatedly_blamed(history: Sequence[Launch], now: float) -> set[str]:
    """Return the nodes that were blamed twice within a day; later, a name may be that of another machine."""
    blame = Counter(node for launch in history if now - launch.ended < DAY_S for node in set(launch.blamed))
    return {node for node, times in blame.items() if times >= 2}


def recently_lost_nodes(history: Sequence[Launch], launcher_id: str, now: float) -> set[str]:
    """Return the nodes that this allocation lost: a scheduler may need minutes to notice. In a new allocation the same node
    counts as healthy."""
    lost = [
        launch
        for launch in history
        if launch.launcher_id == launcher_id and launch.code in (None, PEERS) and now - launch.ended < LEAVING_S
    ]
    return {node for launch in lost for node in launch.blamed}


def launches_without_progress(history: Sequence[Launch]) -> int:
    """Count the launches at the end of the history that made no progress, for any reason."""
    count = 0
    for launch in reversed(history):
        if not launch.made_no_progress:
            break
        count += 1
    return count


def _ended_by(history: Sequence[Launch], last: Launch) -> Stop | None:
    if last.code == DONE:
        return Stop(DONE, "all steps are done")
    if last.code in FINAL:
        error = f": {last.error}" if last.error else ""
        return Stop(int(last.code or 0), f"{FINAL[int(last.code or 0)]}{error}")
    futile = 0
    for launch in reversed(history):
        if not launch.made_no_progress:
            break
        futile += launch.counts_against_limit
    if futile >= MAX_FUTILE_LAUNCHES:
        error = f"; the last error: {last.error}" if last.error else ""
        why = f"{futile} launches in a row committed no more than their own start cost"
        # A code that requests another start would make the scheduler do just that.
        code = 1 if last.code in INTERRUPTED else int(last.code or 1)
        return Stop(code, f"{why}{error}; fix: look at the log of launch {last.number}")
    return None


def _pause(history: Sequence[Launch], jitter: float) -> float:
    """Return 5, 10, 20 … 300 s, halved by chance; an interruption costs none, unless several made no progress."""
    if not history:
        return 0.0
    tried = launches_without_progress(history)
    if history[-1].counts_against_limit or history[-1].code not in INTERRUPTED:
        tried = max(1, tried)
    else:
        tried -= 1
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tried - 1, 30)) * (0.5 + jitter / 2) if tried > 0 else 0.0


def restart_reason(history: Sequence[Launch]) -> str:
    if not history:
        return ""
    last = history[-1]
    if last.noticed:
        return f"AWS takes {', '.join(last.noticed)} away"
    if last.blamed and last.code in (None, PEERS):
        return f"{', '.join(last.blamed)} was lost"
    if last.code is None:
        return "the launcher of the last launch is gone"
    return f"the last launch ended with {last.code}"


def launch_of(record: Mapping[str, Any]) -> Launch:
    """Return the launch that a record of the run's journal describes."""
    names = {
        "code": "code",
        "gained": "gained",
        "start_s": "start_s",
        "step_s": "step_s",
        "said": "error",
        "by": "launcher_id",
    }
    known = {field: record[key] for key, field in names.items() if record.get(key) is not None}
    return Launch(
        number=record["attempt"],
        nodes=tuple(record["nodes"]),
        ended=record.get("ended") or 0.0,
        blamed=tuple(record.get("blamed") or ()),
        noticed=tuple(record.get("noticed") or ()),
        **known,
    )
