"""One call to one node's agent: connect, ask, and find out what became of a broken connection."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from node_setup.fleet.faults import LOST, TIMEOUT, Fault
from node_setup.fleet.hosts import Node
from node_setup.fleet.pool import ANSWERED, Outcome
from node_setup.fleet.protocol import ENDED_STATUS, KILLED_AFTER_S, SPARE_S, Agent, Request, Traffic, send_request
from node_setup.fleet.session import Session
from node_setup.fleet.transport import Connections, Deadline

LEAST_S = KILLED_AFTER_S + SPARE_S + 1
"""With less time than this no node is called."""
RECONNECT_TIMEOUT_S = 20.0
"""This is long enough for a node that only dropped its connections; a node that boots is reported as such, not waited for."""
AGE_TIMEOUT_S = 10.0
"""Reading when the node's first process began may take so long."""
LOCK_WAIT_S = 60.0
"""A tune waits at most so long for one that another run has under way; a first pass takes some ten seconds."""
PID1_AGE = "read up rest </proc/uptime; set -- $(sed 's/.*) //' /proc/1/stat); echo $up ${20} $(getconf CLK_TCK)"
"""It prints the seconds since the kernel's start, the ticks from then to the start of PID 1 (proc(5): field 22), and the ticks
in a second."""


@dataclass(frozen=True)
class AgentCall:
    """It calls each node's agent with the same command, and with a request of the node's own."""

    connections: Connections
    agent: Agent
    command: str
    request: Callable[[Node], Mapping[str, Any]]
    python: str = "python3"
    privileged: bool = True

    def __call__(self, node: Node, deadline: Deadline, traffic: Traffic) -> Outcome:
        began = time.monotonic()
        session = self.connections.connect(node, deadline)
        try:
            seconds = deadline.remaining() - KILLED_AFTER_S - SPARE_S
            if deadline.remaining() < LEAST_S:
                raise Fault(TIMEOUT, "no time was left to call its agent", "give it more --timeout")
            request = Request(self._command_line(seconds), self.request(node), seconds, self.python, self.privileged)
            response = send_request(session, self.agent, request, traffic)
        except Fault as fault:
            if fault.kind != LOST:
                raise
            self.connections.close(session)
            raise self._explain_loss(
                node, fault, Deadline(min(deadline.remaining(), RECONNECT_TIMEOUT_S)), began
            ) from None
        finally:
            self.connections.close(session)
        seconds = time.monotonic() - began
        kind, why, fix = ANSWERED, "", ""
        if response.status in ENDED_STATUS:
            kind, fix = TIMEOUT, "see what it was doing, or give it more --timeout"
            why = f"it took more than {request.seconds:.0f} s and was ended"
        return Outcome(node, kind, why, fix, response.status, response.answer, response.log, seconds, traffic)

    def _command_line(self, seconds: float) -> str:
        """Return the command; a tune spends at most a quarter of its seconds on waiting for its turn."""
        return f"tune --wait {min(LOCK_WAIT_S, seconds / 4):.0f}" if self.command == "tune" else self.command

    def _explain_loss(self, node: Node, fault: Fault, deadline: Deadline, began: float) -> Fault:
        """Return the fault, with what the node itself shows when it can be reached again."""
        again = "run it again: completed steps are skipped"
        try:
            session = self._reconnect(node, deadline)
        except Fault as still:
            why = f"{fault.why}, and since then: {still.why}"
            return Fault(LOST, why, f"wait for the node, then {again}")
        try:
            age = pid1_age(session)
        except Fault:
            return Fault(LOST, fault.why, again)
        finally:
            self.connections.close(session)
        if age is not None and age < time.monotonic() - began:
            return Fault(LOST, f"the node rebooted during the call, {age:.0f} s ago", again)
        return Fault(LOST, f"{fault.why}; the node runs on", again)

    def _reconnect(self, node: Node, deadline: Deadline) -> Session:
        while True:
            try:
                return self.connections.connect(node, deadline)
            except Fault as fault:
                if not fault.passing or deadline.remaining() < 1 or self.connections.stopped.wait(1):
                    raise


def pid1_age(session: Session) -> float | None:
    """Return the seconds since the node's first process began, which in a container is not when the kernel did; None where the
    node does not tell."""
    answer = session.execute(f"sh -c {shlex.quote(PID1_AGE)}", b"", AGE_TIMEOUT_S)
    words = answer.out.split()
    try:
        up, began, ticks = (float(word) for word in words)
    except ValueError:
        return None
    return up - began / ticks if ticks else None
