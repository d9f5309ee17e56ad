"""The run of `fab slurm-up`: ask all machines, plan, and only then change the controller, then the others.

The munge key goes from the controller to the others through this process' memory and standard inputs. It is in no command
line, no answer and no log.
"""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from lustrain.cluster import Cluster
from lustrain.problem import FAILED, UNREACHABLE, Problem, UserError, plain, problem
from node_setup.agent.slurm import paths
from node_setup.fleet.agent_call import AgentCall
from node_setup.fleet.faults import NO_ANSWER, NOT_BEGUN, NOT_REACHED, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.pool import ANSWERED, Outcome
from node_setup.fleet.protocol import Traffic
from node_setup.fleet.run import FleetRun
from node_setup.fleet.transport import Deadline
from node_setup.slurm import conf, health
from node_setup.slurm.members import Member, Report, controller_of, members

REGISTERED_WITHIN_S = 90
KEY_S = 60.0
APPLY = "slurm-apply --wait 60"
"""It waits for a node-tune that is under way."""
Body = Callable[[Node], Mapping[str, Any]]


@dataclass(frozen=True)
class SlurmResult:
    """`outcomes` are those of the changes, one for each machine; `problems` are lines by machine on what is not in order;
    `states` are Slurm's nodes by their host names."""

    machines: tuple[Member, ...]
    outcomes: tuple[Outcome, ...]
    states: Mapping[str, Any]
    problems: Mapping[str, Sequence[Problem]]


def bring_up(run: FleetRun, *, check: bool) -> SlurmResult:
    """Make Slurm of the run's machines, or with `check` tell what would be changed. UserError where nothing was done."""
    cluster = run.inventory.cluster
    assert cluster is not None
    controller = controller_of(cluster, run.inventory.nodes)
    if isinstance(controller, Problem):
        raise UserError(controller)
    reports, silent = _ask(run)
    if silent:
        fix = "bring them back, or take them out of the Cluster"
        line = Problem(
            f"{len(silent)} of {len(run.inventory.nodes)} machines did not answer; nothing was changed; fix: {fix}"
        )
        code = UNREACHABLE if any(outcome.kind in NOT_REACHED for outcome in silent) else FAILED
        raise UserError([*map(_silent_line, silent), line], code)
    machines = members(cluster, controller, reports)
    if lines := [line for line in machines if isinstance(line, Problem)]:
        raise UserError([*lines, Problem("nothing was changed")])
    planned = tuple(machine for machine in machines if isinstance(machine, Member))
    head = next(machine for machine in planned if machine.controls)
    files = _files(cluster, planned)
    if check:
        body = _body(planned, files, head.facts["munge_key"], None, check=True)
        outcomes = _call(run, run.inventory.nodes, APPLY, body)
        if not head.facts["conf"]:
            return SlurmResult(planned, tuple(outcomes), {}, {})
        states = _states(run, planned, 0)
        facts = {machine.node.name: machine.facts for machine in planned}
        return SlurmResult(planned, tuple(outcomes), states["nodes"], health.problems(planned, facts, states))
    outcomes = _apply(run, planned, files)
    if not all(outcome.good for outcome in outcomes):
        return SlurmResult(planned, tuple(outcomes), {}, {})
    states = _states(run, planned, REGISTERED_WITHIN_S)
    again, silent = _ask(run)
    facts = {report.node.name: report.facts for report in again}
    found = health.problems([machine for machine in planned if machine.node.name in facts], facts, states)
    found |= {outcome.node.name: [_silent_line(outcome)] for outcome in silent}
    return SlurmResult(planned, tuple(outcomes), states["nodes"], found)


def _ask(run: FleetRun) -> tuple[list[Report], list[Outcome]]:
    """Return the facts of the machines that tell them, and the outcomes of the others."""
    asked: dict[str, tuple[float, float]] = {}
    call = _agent_call(run, "slurm-facts", lambda node: {})

    def work(node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        began = time.time()
        outcome = call(node, deadline, traffic)
        asked[node.name] = (began, time.time())
        return outcome

    outcomes = run.run_on_nodes("node slurm-facts", work)
    reports, silent = [], []
    for outcome in outcomes:
        if not outcome.good or outcome.answer is None or outcome.answer.slurm is None:
            silent.append(outcome)
            continue
        facts, (began, ended) = outcome.answer.slurm, asked[outcome.node.name]
        reports.append(Report(outcome.node, facts, facts["clock"] - ended, facts["clock"] - began))
    return reports, silent


def _silent_line(outcome: Outcome) -> Problem:
    return problem(outcome.node.name, outcome.kind, _why(outcome), fix=outcome.fix)


def _files(cluster: Cluster, machines: Sequence[Member]) -> list[dict[str, Any]]:
    return [
        {"name": name, "content": content, "mode": 0o755 if name == conf.HEALTH_CHECK else 0o644}
        for name, content in conf.files(cluster, machines).items()
    ]


def _apply(run: FleetRun, machines: Sequence[Member], files: list[dict[str, Any]]) -> list[Outcome]:
    """Change the controller first: the others need its key, and slurmd an slurmctld that knows it."""
    head = next(machine for machine in machines if machine.controls)
    others = [machine.node for machine in machines if not machine.controls]
    (first,) = _call(run, [head.node], APPLY, _body(machines, files, None, None))
    done = {head.node.name: first}
    if first.good and others:
        try:
            digest, key = _key(run, head.node)
        except Fault as fault:
            done[head.node.name] = first = replace(first, kind=fault.kind, why=fault.why, fix=fault.fix, status=None)
        else:
            outcomes = _call(run, others, APPLY, _body(machines, files, digest, key))
            done |= {outcome.node.name: outcome for outcome in outcomes}
    why, fix = f"the controller {head.node.name} was not set up", "mend it and run fab slurm-up again"
    return [done.get(machine.node.name) or Outcome(machine.node, NOT_BEGUN, why, fix) for machine in machines]


def _body(
    machines: Sequence[Member],
    files: list[dict[str, Any]],
    digest: str | None,
    key: bytes | None,
    *,
    check: bool = False,
) -> Body:
    duties = {machine.node.name: list(machine.duties) for machine in machines}
    encoded = None if key is None else base64.b64encode(key).decode()

    def body(node: Node) -> Mapping[str, Any]:
        # The controller's own key is the cluster's.
        of_others = {} if "controller" in duties[node.name] else {"munge_digest": digest, "munge_key": encoded}
        return {"duties": duties[node.name], "files": files, "check": check, **of_others}

    return body


def _key(run: FleetRun, controller: Node) -> tuple[str, bytes]:
    """Return the controller's munge key with its digest, which its agent tells by a way of its own. Fault."""
    (outcome,) = _call(run, [controller], "slurm-facts", lambda node: {})
    if not outcome.good or outcome.answer is None or outcome.answer.slurm is None:
        raise Fault(outcome.kind, _why(outcome), outcome.fix)
    digest = outcome.answer.slurm["munge_key"]
    session = run.connections.connect(controller, Deadline(KEY_S))
    try:
        words = ["cat", paths.MUNGE_KEY]
        done = session.execute(shlex.join(words if session.root else ["sudo", "-n", *words]), b"", KEY_S)
    finally:
        run.connections.close(session)
    if sha256(done.out).hexdigest() != digest:
        why = "its munge key did not come over whole"
        raise Fault(NO_ANSWER, why, "take out of the login shell's files what prints without a terminal")
    return digest, done.out


def _states(run: FleetRun, machines: Sequence[Member], wait_s: int) -> Mapping[str, Any]:
    head = next(machine.node for machine in machines if machine.controls)
    awaited = {"nodes": [machine.host for machine in machines if machine.computes], "wait_s": wait_s}
    (outcome,) = _call(run, [head], "slurm-state", lambda node: awaited)
    if not outcome.good or outcome.answer is None or outcome.answer.slurm is None:
        return {"error": _why(outcome), "nodes": {}}
    return outcome.answer.slurm


def _call(run: FleetRun, nodes: Sequence[Node], command: str, body: Body) -> list[Outcome]:
    some = replace(run, inventory=replace(run.inventory, nodes=tuple(nodes)))
    return some.run_on_nodes(f"node {command}", _agent_call(run, command, body))


def _agent_call(run: FleetRun, command: str, body: Body) -> AgentCall:
    return AgentCall(run.connections, run.agent, command, body, run.options.python)


def _why(outcome: Outcome) -> str:
    errors = [error.why for error in outcome.answer.errors] if outcome.answer else []
    refused = [outcome.answer.refused] if outcome.answer and outcome.answer.refused else []
    return plain(outcome.why or "; ".join([*refused, *errors]) or ANSWERED)
