"""The reboot of nodes, which counts as done when a later boot answers and has nothing left to do."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from typing import Any

from lustrain.flags import number
from lustrain.problem import UserError
from node_setup.agent.model import EXIT_DRIFT, EXIT_IN_SYNC
from node_setup.answers import AgentResponse
from node_setup.fleet.agent_call import LEAST_S
from node_setup.fleet.faults import HOST_KEY, STOPPED, TIMEOUT, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.pool import Outcome
from node_setup.fleet.protocol import Traffic
from node_setup.fleet.run import FleetRun
from node_setup.fleet.transport import Deadline

IDS = 25
"""BatchRebootClusterNodes takes so many instance ids at once (SageMaker API reference)."""
POLL_INTERVAL_S = 2.0
POLL_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 120.0
"""So long after sshd answers the boot unit has to apply what does not outlast a boot."""
REBOOT = "( sleep 1; systemctl reboot || reboot ) </dev/null >/dev/null 2>&1 &"
"""A connection that waits for its own end may wait forever (pyinfra issues 1708 and 1711)."""


def reboot(run: FleetRun, *, check: bool, wait: str) -> list[Outcome]:
    """Reboot nodes; status 0 means back and in sync, 2 back and not in sync. UserError where nothing may be rebooted this
    way."""
    seconds = number("--wait", wait, 30, 86400) or 0
    nodes = run.inventory.nodes
    if any(node.local for node in nodes):
        raise UserError(
            "this machine cannot wait for its own reboot; fix: reboot it by hand, then fab node-tune --local"
        )
    work = _Reboot(run, check)
    # Waiting is the work: nothing is gained by more time for a node than --wait says.
    paced = replace(run, concurrency=replace(run.concurrency, node_s=seconds))
    return paced.run_on_nodes("node reboot", work)


def without_logins(run: FleetRun) -> FleetRun:
    """Leave login machines out, with a note: a person's session there is no job that would refuse the reboot."""
    cluster = run.inventory.cluster
    groups = {name for name, group in cluster.groups.items() if group.role == "login"} if cluster else set()
    logins = [node for node in run.inventory.nodes if node.group in groups]
    if not logins:
        return run
    nodes = tuple(node for node in run.inventory.nodes if node not in logins)
    names = ", ".join(node.name for node in logins)
    note = f"left out, since people work there: {names}; --group {','.join(sorted(groups))} reboots them"
    return replace(run, inventory=replace(run.inventory, nodes=nodes), notes=(*run.notes, note))


@dataclass(frozen=True)
class HyperPodReboot:
    """These are the nodes that HyperPod has to reboot: the workers' outcomes, and the commands for those that are idle."""

    outcomes: list[Outcome]
    commands: list[str]
    lines: list[str]


def belongs_to_hyperpod(run: FleetRun) -> bool:
    """Check whether HyperPod owns the nodes: it may take a node for faulty that goes away without it."""
    cluster = run.inventory.cluster
    return bool(cluster and cluster.nodes.hyperpod_cluster)


def plan_hyperpod_reboot(run: FleetRun) -> HyperPodReboot:
    """Check whether workers may be rebooted, and reboot nothing. Controllers and login nodes are left out: without
    them no job runs anywhere, so they are not rebooted with the nodes."""
    cluster = run.inventory.cluster
    assert cluster is not None
    roles = {name: group.role for name, group in cluster.groups.items()}
    workers = tuple(node for node in run.inventory.nodes if roles.get(node.group or "") == "worker")
    worker_run = replace(run, inventory=replace(run.inventory, nodes=workers))
    outcomes = [_idle(outcome) for outcome in worker_run.call_agents("reboot-check")] if workers else []
    ids = [str(outcome.node.instance_id) for outcome in outcomes if outcome.answer and outcome.answer.did]
    where = ["--region", cluster.region] if cluster.region else []
    command = ["aws", "sagemaker", "batch-reboot-cluster-nodes", *where]
    command += ["--cluster-name", str(cluster.nodes.hyperpod_cluster), "--node-ids"]
    commands = [shlex.join([*command, *ids[begin : begin + IDS]]) for begin in range(0, len(ids), IDS)]
    others = [node.name for node in run.inventory.nodes if node not in workers]
    lines = [f"left out, since they are not workers: {', '.join(others)}"] if others else []
    if commands:
        lines += ["nothing was rebooted: HyperPod reboots its nodes itself, else it may take one for faulty; fix:"]
        lines += [f"  {command}" for command in commands]
    else:
        lines.append("nothing was rebooted: no worker may be rebooted now")
    return HyperPodReboot(outcomes, commands, lines)


def _idle(outcome: Outcome) -> Outcome:
    if outcome.status != EXIT_IN_SYNC or outcome.answer is None:
        return outcome
    if outcome.node.instance_id is None:
        return replace(outcome, why="its instance id is not known", fix="see the cluster in the console", status=None)
    return _did(outcome, "idle, HyperPod's to reboot")


def _did(outcome: Outcome, what: str) -> Outcome:
    return replace(outcome, answer=outcome.answer and outcome.answer.model_copy(update={"did": what}))


@dataclass(frozen=True)
class _Reboot:
    run: FleetRun
    check: bool

    def __call__(self, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        began = time.monotonic()
        before = self._call_agent("reboot-check", node, deadline, traffic)
        if before.status != EXIT_IN_SYNC or before.answer is None:
            return before
        if self.check:
            return _did(before, "would be rebooted")
        self._send_reboot(node, deadline)
        self._wait_for_boot(node, _boot(before.answer), deadline, traffic)
        back_s = time.monotonic() - began
        after = self._plan_after_boot(node, deadline, traffic)
        return replace(_did(after, f"rebooted, back after {back_s:.0f} s"), seconds=time.monotonic() - began)

    def _call_agent(self, command: str, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        return self.run.agent_call(command)(node, deadline, traffic)

    def _send_reboot(self, node: Node, deadline: Deadline) -> None:
        session = self.run.connections.connect(node, deadline)
        try:
            script = shlex.join(["sh", "-c", REBOOT])
            session.execute(script if session.root else f"sudo -n {script}", b"", min(20, deadline.remaining()))
        finally:
            self.run.connections.close(session)

    def _wait_for_boot(self, node: Node, before: tuple[Any, ...] | None, deadline: Deadline, traffic: Traffic) -> None:
        """Wait until another boot answers. Fault."""
        last = "it never went down"
        while deadline.remaining() > LEAST_S:
            if self.run.connections.stopped.wait(POLL_INTERVAL_S):
                raise Fault(STOPPED, "stopped while it rebooted")
            try:
                now = self._call_agent(
                    "reboot-check", node, Deadline(min(POLL_TIMEOUT_S, deadline.remaining())), traffic
                )
            except Fault as fault:
                if fault.kind in (HOST_KEY, STOPPED):
                    raise
                last = f"{fault.kind}: {fault.why}"
                continue
            if now.answer and now.answer.boot and _boot(now.answer) != before:
                return
        raise Fault(
            TIMEOUT,
            f"its reboot was started, and it is not back in time; {last}",
            "look at its console, or --wait longer",
        )

    def _plan_after_boot(self, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        """Return the plan after the boot; the boot unit may still be at work."""
        end = Deadline(min(SETTLE_TIMEOUT_S, deadline.remaining()))
        while True:
            after = self._call_agent("plan", node, Deadline(max(2 * LEAST_S, deadline.remaining())), traffic)
            if after.status != EXIT_DRIFT or end.remaining() <= 0 or self.run.connections.stopped.wait(POLL_INTERVAL_S):
                return after


def _boot(answer: AgentResponse) -> tuple[Any, ...] | None:
    """Return what is new with each boot; in a container only when PID 1 began."""
    return (answer.boot.boot_id, answer.boot.pid1_start) if answer.boot else None
