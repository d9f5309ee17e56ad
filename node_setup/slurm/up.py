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
from node_setup.slurm import accounting, conf, health, jobs
from node_setup.slurm.machines import Report, SlurmMachine, controller_of, plan_machines

REGISTERED_WITHIN_S = 90
KEY_S = 60.0
APPLY = "slurm-apply --wait 60"
"""It waits for a node-tune that is under way."""
Body = Callable[[Node], Mapping[str, Any]]


@dataclass(frozen=True)
class SlurmResult:
    """`outcomes` are those of the changes, one for each machine; `problems` are lines by machine on what is not in order;
    `states` are Slurm's nodes by their host names."""

    machines: tuple[SlurmMachine, ...]
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
    machines = plan_machines(cluster, controller, reports)
    if lines := [line for line in machines if isinstance(line, Problem)]:
        raise UserError([*lines, Problem("nothing was changed")])
    planned = tuple(machine for machine in machines if isinstance(machine, SlurmMachine))
    head = next(machine for machine in planned if machine.controls)
    states = _states(run, planned, head, 0) if head.facts["conf"] else None
    if lines := _lost_jobs(run, planned, head, states):
        raise UserError([*lines, Problem("nothing was changed")])
    files = _files(cluster, planned)
    if check:
        body = _body(
            planned, files, head.facts["munge_key"], None, check=True, recorded=controllers_accounting(cluster)
        )
        outcomes = _call(run, run.inventory.nodes, APPLY, body)
        if states is None:
            return SlurmResult(planned, tuple(outcomes), {}, {})
        facts = {machine.node.name: machine.facts for machine in planned}
        return SlurmResult(planned, tuple(outcomes), states["nodes"], health.problems(planned, facts, states))
    outcomes = _apply(run, planned, files, controllers_accounting(cluster))
    if not all(outcome.good for outcome in outcomes):
        return SlurmResult(planned, tuple(outcomes), {}, {})
    states = _states(run, planned, head, REGISTERED_WITHIN_S)
    reports, silent = _ask(run)
    facts = {report.node.name: report.facts for report in reports}
    problems = health.problems([machine for machine in planned if machine.node.name in facts], facts, states)
    problems |= {outcome.node.name: [_silent_line(outcome)] for outcome in silent}
    return SlurmResult(planned, tuple(outcomes), states["nodes"], problems)


def _ask(run: FleetRun) -> tuple[list[Report], list[Outcome]]:
    """Return the facts of the machines that tell them, and the outcomes of the others."""
    called: dict[str, tuple[float, float]] = {}
    call = _agent_call(run, "slurm-facts", lambda node: {})

    def work(node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        began = time.time()
        outcome = call(node, deadline, traffic)
        called[node.name] = (began, time.time())
        return outcome

    outcomes = run.run_on_nodes("node slurm-facts", work)
    reports, silent = [], []
    for outcome in outcomes:
        if not outcome.good or outcome.answer is None or outcome.answer.slurm is None:
            silent.append(outcome)
            continue
        facts, (began, ended) = outcome.answer.slurm, called[outcome.node.name]
        reports.append(Report(outcome.node, facts, facts["clock"] - ended, facts["clock"] - began))
    return reports, silent


def _lost_jobs(
    run: FleetRun, machines: Sequence[SlurmMachine], head: SlurmMachine, states: Mapping[str, Any] | None
) -> list[Problem]:
    """Return a line for each node whose jobs the change would end: nodes that leave, and where the controller moves, all; and
    one for jobs that wait to start again while nodes leave.

    `states` are those that the planned controller sees. Where it runs no slurmctld yet, another machine's has answered it. A
    slurmctld that does not answer tells of no jobs.
    """
    leaves, unknown = (
        "would not be a node for jobs any more",
        f"the new controller {head.node.name} would not know them",
    )
    kept = [machine.host for machine in machines if machine.computes]
    lines: list[Problem] = []
    if states is not None and _slurmctld(head) in ("inactive", "failed"):
        lines += jobs.lost_job_problems(states, (), unknown)
    elif states is not None:
        lines += [*jobs.lost_job_problems(states, kept, leaves), *jobs.requeued_job_problems(states, kept)]
    for machine in machines:
        if machine is not head and _slurmctld(machine) == "active":
            lines += jobs.lost_job_problems(_states(run, machines, machine, 0), (), unknown)
    return [*{line.path: line for line in lines}.values()]


def _slurmctld(machine: SlurmMachine) -> str | None:
    active: str | None = machine.facts["units"]["slurmctld.service"]["active"]
    return active


def _silent_line(outcome: Outcome) -> Problem:
    return problem(outcome.node.name, outcome.kind, _why(outcome), fix=outcome.fix)


def _files(cluster: Cluster, machines: Sequence[SlurmMachine]) -> list[dict[str, Any]]:
    return [
        {"name": name, "content": content, "mode": 0o755 if name == conf.HEALTH_CHECK else 0o644}
        for name, content in conf.files(cluster, machines).items()
    ]


def controllers_accounting(cluster: Cluster) -> dict[str, str] | None:
    """Return what the controller is told of slurmdbd; None without accounting."""
    if cluster.slurm is None or cluster.slurm.accounting is None:
        return None
    text = accounting.slurmdbd_conf(cluster.slurm.accounting.keep_months, None)
    return {"cluster": conf.cluster_name(cluster.name), "conf": text}


def _apply(
    run: FleetRun, machines: Sequence[SlurmMachine], files: list[dict[str, Any]], recorded: Mapping[str, str] | None
) -> list[Outcome]:
    """Change the controller first: the others need its key, and slurmd an slurmctld that knows it."""
    head = next(machine for machine in machines if machine.controls)
    others = [machine.node for machine in machines if not machine.controls]
    (first,) = _call(run, [head.node], APPLY, _body(machines, files, None, None, recorded=recorded))
    done = {head.node.name: first}
    if first.good and others:
        try:
            digest = head.facts["munge_key"] or _digest(run, head.node)
            key = _key(run, head.node, digest) if _lack_key(machines, digest) else None
        except Fault as fault:
            done[head.node.name] = first = replace(first, kind=fault.kind, why=fault.why, fix=fault.fix, status=None)
        else:
            outcomes = _call(run, others, APPLY, _body(machines, files, digest, key))
            done |= {outcome.node.name: outcome for outcome in outcomes}
    why, fix = f"the controller {head.node.name} was not set up", "mend it and run fab slurm-up again"
    return [done.get(machine.node.name) or Outcome(machine.node, NOT_BEGUN, why, fix) for machine in machines]


def _body(
    machines: Sequence[SlurmMachine],
    files: list[dict[str, Any]],
    digest: str | None,
    key: bytes | None,
    *,
    check: bool = False,
    recorded: Mapping[str, str] | None = None,
) -> Body:
    duties = {machine.node.name: list(machine.duties) for machine in machines}
    encoded = None if key is None else base64.b64encode(key).decode()
    lacking = _lack_key(machines, digest)
    records = {"accounting": recorded} if recorded else {}

    def body(node: Node) -> Mapping[str, Any]:
        # The controller's own key is the cluster's.
        sent = {"munge_digest": digest, "munge_key": encoded if node.name in lacking else None}
        own = records if "controller" in duties[node.name] else sent
        return {"duties": duties[node.name], "files": files, "check": check, **own}

    return body


def _lack_key(machines: Sequence[SlurmMachine], digest: str | None) -> set[str]:
    """Return the names of the machines that need the controller's key sent."""
    return {machine.node.name for machine in machines if not machine.controls and machine.facts["munge_key"] != digest}


def _digest(run: FleetRun, controller: Node) -> str:
    """Return the digest of the munge key that the controller has made. Fault."""
    (outcome,) = _call(run, [controller], "slurm-facts", lambda node: {})
    if not outcome.good or outcome.answer is None or outcome.answer.slurm is None:
        raise Fault(outcome.kind, _why(outcome), outcome.fix)
    return str(outcome.answer.slurm["munge_key"])


def _key(run: FleetRun, controller: Node, digest: str) -> bytes:
    """Return the controller's munge key, whose digest its agent reported by a way of its own. Fault."""
    session = run.connections.connect(controller, Deadline(KEY_S))
    try:
        words = ["cat", paths.MUNGE_KEY]
        done = session.execute(shlex.join(words if session.root else ["sudo", "-n", *words]), b"", KEY_S)
    finally:
        run.connections.close(session)
    if sha256(done.out).hexdigest() != digest:
        why = "its munge key did not come over whole"
        raise Fault(NO_ANSWER, why, "take out of the login shell's files what prints without a terminal")
    return done.out


def _states(
    run: FleetRun, machines: Sequence[SlurmMachine], controller: SlurmMachine, wait_s: int
) -> Mapping[str, Any]:
    """Return what this controller says of its nodes, once those for jobs have registered or their time is over."""
    awaited = {"nodes": [machine.host for machine in machines if machine.computes], "wait_s": wait_s}
    (outcome,) = _call(run, [controller.node], "slurm-state", lambda node: awaited)
    if not outcome.good or outcome.answer is None or outcome.answer.slurm is None:
        return {"error": _why(outcome), "nodes": {}, "requeued": []}
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
