"""The all-reduce of node-verify on the fleet: by srun where a Slurm node can call it, by mpirun otherwise."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lustrain.cluster import NodeGroup
from node_setup.allreduce.nccl_tests import PROGRAM, Judgement, by_mpirun, by_srun, floor
from node_setup.allreduce.programs import UNNAMED, Programs, find, libraries, missing_program
from node_setup.allreduce.search import Measurement, measure
from node_setup.answers import AgentResponse
from node_setup.fleet.faults import Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.pool import Outcome
from node_setup.fleet.protocol import KILLED_AFTER_S, SPARE_S
from node_setup.fleet.run import FleetRun
from node_setup.fleet.transport import Deadline

GOOD = ("ok", "unmeasured")
LEAST_S = 30.0
"""With less time than this no all-reduce begins: NCCL alone takes that long to start on many nodes."""
_NAMED = 3


@dataclass(frozen=True)
class Reduction:
    """This is the result of one group's all-reduce; `measured` is None where it was not run, and `why` says why, or what went
    wrong.

    `left_out` are ready nodes that were not to be disturbed, with the reason. `unable`: it was requested, had
    the nodes to run on, and still could not run.
    """

    group: str
    measured: Measurement | None
    why: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    unable: bool = False

    @property
    def good(self) -> bool:
        return not self.unable if self.measured is None else self.measured.all_nodes.status in GOOD


def all_reduce(
    run: FleetRun, outcomes: Sequence[Outcome], deadline: Deadline, named: Programs = UNNAMED
) -> list[Reduction]:
    """Run one all-reduce for each group with accelerators, all within `deadline`. Nodes that are not ready are left out: they
    would be blamed for what is known; nodes with a job too: the job would pay for it."""
    cluster = run.inventory.cluster
    if cluster is None:
        return [
            Reduction("", None, ("the number of GPUs of these nodes is not known; fix: give --cluster or --stack",))
        ]
    callers = [
        outcome for outcome in outcomes if outcome.answer and _role(run, outcome.node) in ("controller", "login")
    ]
    caller = callers[0].node if callers and cluster.backend == "hyperpod-slurm" else None
    reductions = []
    for name, group in cluster.groups.items():
        if group.gpus and group.role == "worker":
            ready = [
                outcome
                for outcome in outcomes
                if outcome.node.group == name and outcome.answer and outcome.answer.ready
            ]
            reductions.append(_group(_Launch(run, name, group, caller, deadline), ready, named))
    return reductions


def busy(answer: AgentResponse) -> str:
    """Return why a node that is ready is not to be disturbed; empty where nothing runs there. Unknown counts as busy."""
    jobs = answer.jobs
    if jobs is None:
        return "it is not known whether a job runs"
    shown = ", ".join(f"{job.kind} {job.id}" for job in jobs[:_NAMED])
    return f"a job runs: {shown}{f' and {len(jobs) - _NAMED} more' if len(jobs) > _NAMED else ''}" if jobs else ""


@dataclass
class _Launch:
    """This starts one group's launches: through `caller`, or where that is None through the first node of each set."""

    run: FleetRun
    name: str
    group: NodeGroup
    caller: Node | None
    deadline: Deadline
    nodes: dict[str, Node] = field(default_factory=dict)
    test: str = PROGRAM
    launcher: str = ""
    troubles: list[str] = field(default_factory=list)

    def over(self) -> str:
        """Return why nothing more may begin, or an empty text."""
        if self.run.connections.stopped.is_set():
            return "stopped by Ctrl-C"
        return (
            ""
            if self.deadline.remaining() > LEAST_S
            else f"the {self.run.concurrency.total_s:g} s for all nodes are over"
        )

    def find(self, named: Programs) -> str:
        """Find the test on a worker and the launcher where it is called; return why it cannot be run, or an empty text.
        Fault."""
        worker = next(iter(self.nodes.values()))
        launcher = "srun" if self.caller else "mpirun"
        for node, name, given in (
            (worker, PROGRAM, named.test),
            (self.caller or worker, launcher, None if self.caller else named.mpirun),
        ):
            session = self.run.connections.connect(node, self.deadline)
            try:
                path = find(session, name, given)
            finally:
                self.run.connections.close(session)
            if path is None:
                return missing_program(name, given, node.name)
            if name == PROGRAM:
                self.test = path
            else:
                self.launcher = path
        return ""

    def __call__(self, sets: Sequence[tuple[str, ...]]) -> list[str]:
        what = f"{len(sets)} pairs at once" if len(sets) > 1 else f"{len(sets[0])} nodes together"
        print(f"all-reduce of {self.name}: {what}, at most {self._seconds():.0f} s", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(min(len(sets), self.run.concurrency.max_parallel)) as pool:
            try:
                return list(pool.map(self._reduce, sets))
            except KeyboardInterrupt:
                # Closing the connections ends the threads, for which leaving the pool waits.
                self.run.connections.stop()
                self.troubles.append("stopped by Ctrl-C")
                return [""] * len(sets)

    def _reduce(self, words: tuple[str, ...]) -> str:
        size, efa = floor(self.group.type).bytes, bool(self.group.efa)
        if self.caller:
            command = by_srun(words, self.group.gpus, size, efa=efa, program=self.test)
            command[0] = self.launcher
        else:
            command = by_mpirun(words, self.group.gpus, size, efa=efa, program=self.test, mpirun=self.launcher)
        try:
            return self._output(self.caller or self.nodes[words[0]], command)
        except Fault as fault:
            self.troubles.append(f"{' '.join(words)}: {fault}")
            return ""

    def _seconds(self) -> float:
        return max(1.0, min(self.run.options.timeout_s, self.deadline.remaining() - KILLED_AFTER_S - SPARE_S))

    def _output(self, node: Node, command: Sequence[str]) -> str:
        seconds = self._seconds()
        # Open MPI wants root to say twice that it means it.
        words = ["env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
        searched = libraries(self.test)
        path = f'LD_LIBRARY_PATH={shlex.quote(searched)}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" ' if searched else ""
        limit = f"timeout -k {KILLED_AFTER_S} {seconds:.0f}"
        script = f"exec {shlex.join(words)} {path}{limit} {shlex.join(command)}"
        session = self.run.connections.connect(node, Deadline(seconds))
        try:
            answer = session.execute(shlex.join(["sh", "-c", script]), b"", seconds + KILLED_AFTER_S + SPARE_S)
        finally:
            self.run.connections.close(session)
        text = (answer.out + b"\n" + answer.err).decode(errors="replace")
        if answer.status:
            printed = [line.strip() for line in text.splitlines() if line.strip()]
            raise Fault("all-reduce", f"status {answer.status}: {printed[-1] if printed else 'it printed nothing'}")
        return text


def _group(launch: _Launch, ready: Sequence[Outcome], named: Programs) -> Reduction:
    name = launch.name
    left_out = {outcome.node.name: why for outcome in ready if outcome.answer and (why := busy(outcome.answer))}
    free = [outcome for outcome in ready if outcome.node.name not in left_out]
    if len(free) < 2:
        many = f"{len(free)} of its nodes are ready{' and idle' if left_out else ''}"
        return Reduction(name, None, (f"not run: {many}, it takes two",), left_out)
    launch.nodes = {_word(outcome, launch.caller): outcome.node for outcome in free}
    try:
        lack = launch.over() or launch.find(named)
    except Fault as fault:
        lack = f"the search for its programs failed: {fault}"
    if lack:
        return Reduction(name, None, (f"not run: {lack}",), left_out, unable=True)
    measured = measure(list(launch.nodes), launch.group.type, launch.group.efa, launch, launch.over)
    return Reduction(name, measured, tuple(dict.fromkeys(launch.troubles)), left_out)


def _word(outcome: Outcome, caller: Node | None) -> str:
    """Return the launcher's name of a node: Slurm its host name, mpirun as well where we have no address of it."""
    node = outcome.node
    host = outcome.answer.host if outcome.answer and isinstance(outcome.answer.host, str) else node.name
    return host if caller or node.route.proxy else node.address


def _role(run: FleetRun, node: Node) -> str | None:
    cluster = run.inventory.cluster
    group = cluster.groups.get(node.group or "") if cluster else None
    return group.role if group else None


def lines(reductions: Sequence[Reduction]) -> list[str]:
    """Return node-verify's lines about it."""
    text = []
    for reduction in reductions:
        head = f"all-reduce{f' of {reduction.group}' if reduction.group else ''}"
        text += [f"{head}: {name} is left out: {why}" for name, why in reduction.left_out.items()]
        if reduction.measured is None:
            text += [f"{head}: {why}" for why in reduction.why]
            continue
        text += ["", f"{head}: {_verdict_text(reduction.measured.all_nodes)}", *(f"  {why}" for why in reduction.why)]
        text += [
            f"  {' and '.join(sorted(pair))}: {_verdict_text(verdict)}"
            for pair, verdict in reduction.measured.pairs.items()
        ]
        if reduction.measured.suspects.culprits:
            text.append(f"  slow in every pair: {', '.join(reduction.measured.suspects.culprits)}")
        if reduction.measured.ended:
            text.append(f"  the search for the bad node ended: {reduction.measured.ended}")
    return text


def _verdict_text(verdict: Judgement) -> str:
    return f"{verdict.status}: {verdict.why}"


def as_json(reductions: Sequence[Reduction]) -> list[dict[str, Any]]:
    return [_as_json(reduction) for reduction in reductions]


def _as_json(reduction: Reduction) -> dict[str, Any]:
    measured = reduction.measured
    return {
        "group": reduction.group,
        "why": list(reduction.why),
        "left_out": dict(reduction.left_out),
        "together": vars(measured.all_nodes) if measured else None,
        "pairs": [{"nodes": sorted(pair), **vars(verdict)} for pair, verdict in measured.pairs.items()]
        if measured
        else [],
        "culprits": list(measured.suspects.culprits) if measured else [],
        "ended": measured.ended if measured else "",
    }
