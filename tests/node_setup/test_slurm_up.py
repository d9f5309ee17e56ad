"""The order of `fab slurm-up`, and where the key goes: real calls of the agent, over sessions that answer from a script."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UNREACHABLE, UserError
from node_setup.fleet.faults import NO_ANSWER, NOT_BEGUN, Fault
from node_setup.fleet.faults import UNREACHABLE as NO_WAY
from node_setup.fleet.hosts import Node
from node_setup.fleet.inventory import Inventory
from node_setup.fleet.options import Options
from node_setup.fleet.pool import ANSWERED, Concurrency
from node_setup.fleet.protocol import Agent
from node_setup.fleet.run import FleetRun
from node_setup.fleet.session import Completed
from node_setup.request import Tuning
from node_setup.slurm import up
from tests.node_setup.slurm_machines import cluster, small_machines

KEY = bytes(range(1, 129))
DIGEST = sha256(KEY).hexdigest()
ROW = {"setting": "slurm.file", "target": "/etc/slurm/slurm.conf", "why": "", "found": None, "wanted": "as planned"}


@dataclass
class Sessions:
    """Connections to three machines; `calls` are what was executed: machine, command of the agent or `cat`, and input."""

    facts: dict[str, dict[str, Any]]
    silent: Callable[[str, int], bool] = lambda node, call: False
    """Whether a machine is out of reach at its so-manieth connection."""
    failing: str = ""
    """A machine on which a step fails."""
    banner: bytes = b""
    """What the controller's login shell prints."""
    calls: list[tuple[str, str, bytes]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    connections: dict[str, int] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)

    def connect(self, node: Node, deadline: object) -> Session:
        self.connections[node.name] = self.connections.get(node.name, 0) + 1
        if self.silent(node.name, self.connections[node.name]):
            raise Fault(NO_WAY, "no route to host", "check that the machine runs")
        return Session(self, node.name)

    def close(self, session: object) -> None:
        """Nothing is open."""

    def commands(self) -> list[tuple[str, str]]:
        return [(node, command) for node, command, _ in self.calls]


@dataclass
class Session:
    sessions: Sessions
    node: str
    root: bool = True
    root_fix: str = ""
    user: str = "root"

    def execute(self, command: str, stdin: bytes, seconds: float) -> Completed:
        known = ("slurm-facts", "slurm-apply", "slurm-state", "cat")
        verb = next(word for word in known if word in command)
        self.sessions.calls.append((self.node, verb, stdin))
        self.sessions.lines.append(command)
        if verb == "cat":
            return Completed(0, self.sessions.banner + KEY, b"")
        answer: dict[str, Any] = {"version": 1, "agent": "sha"}
        status = 0
        if verb == "slurm-facts":
            answer["slurm"] = self.sessions.facts[self.node]
        elif verb == "slurm-state":
            idle = {"state": "IDLE", "gres": None, "reason": None}
            answer["slurm"] = {"error": None, "nodes": {"node2": idle, "node3": idle}}
        else:
            status = int(self.node == self.sessions.failing)
            answer["rows"] = [ROW | {"status": "failed" if status else "changed"}]
        return Completed(status, json.dumps(answer).encode(), b"")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    units = {unit: {"active": "active"} for unit in ("munge.service", "slurmctld.service", "slurmd.service")}
    told = {
        report.node.name: {**report.facts, "munge_key": DIGEST, "units": units} for report in small_machines(tmp_path)
    }
    return Sessions(told)


def bring_up(sessions: Sessions, *, check: bool = False) -> up.SlurmResult:
    nodes = tuple(Node(name, f"10.0.0.{at}", "train") for at, name in enumerate(("node1", "node2", "node3"), 11))
    run = FleetRun(
        Options(),
        Inventory(nodes, cluster()),
        Tuning(),
        sessions,  # type: ignore[arg-type]
        Concurrency(max_parallel=1),
        Agent(b"", "sha"),
    )
    return up.bring_up(run, check=check)


ALL = ("node1", "node2", "node3")
ASKED = [(name, "slurm-facts") for name in ALL]


def test_all_are_asked_then_the_controller_is_changed_first(sessions: Sessions) -> None:
    result = bring_up(sessions)
    assert [outcome.kind for outcome in result.outcomes] == [ANSWERED] * 3
    assert result.problems == {}
    head = [("node1", "slurm-apply"), ("node1", "slurm-facts"), ("node1", "cat")]
    others = [("node2", "slurm-apply"), ("node3", "slurm-apply")]
    assert sessions.commands() == [*ASKED, *head, *others, ("node1", "slurm-state"), *ASKED]


def test_the_key_goes_to_the_others_by_standard_input_alone(sessions: Sessions) -> None:
    bring_up(sessions)
    encoded = base64.b64encode(KEY)
    assert [(node, verb) for node, verb, stdin in sessions.calls if encoded in stdin] == [
        ("node2", "slurm-apply"),
        ("node3", "slurm-apply"),
    ]
    assert not any(encoded.decode() in line or KEY.hex() in line for line in sessions.lines)


def test_a_look_reads_no_key_and_asks_for_no_change(sessions: Sessions) -> None:
    bring_up(sessions, check=True)
    bodies = [json.loads(stdin) for _, verb, stdin in sessions.calls if verb == "slurm-apply"]
    assert [body["check"] for body in bodies] == [True] * 3
    assert ("node1", "cat") not in sessions.commands()


def test_a_silent_machine_keeps_all_as_they_are(sessions: Sessions) -> None:
    sessions.silent = lambda node, call: node == "node3"
    with pytest.raises(UserError) as refused:
        bring_up(sessions)
    assert refused.value.exit_code == UNREACHABLE
    assert refused.value.problems[0].path == "node3"
    assert sessions.commands() == ASKED[:2]


def test_a_machine_that_does_not_fit_keeps_all_as_they_are(sessions: Sessions) -> None:
    sessions.facts["node3"]["offered"] = "20.02.1"
    with pytest.raises(UserError):
        bring_up(sessions)
    assert sessions.commands() == ASKED


def test_where_the_controller_fails_the_others_are_not_begun(sessions: Sessions) -> None:
    sessions.failing = "node1"
    result = bring_up(sessions)
    assert [outcome.kind for outcome in result.outcomes] == [ANSWERED, NOT_BEGUN, NOT_BEGUN]
    assert sessions.commands() == [*ASKED, ("node1", "slurm-apply")]


def test_a_key_that_came_over_changed_is_given_to_nobody(sessions: Sessions) -> None:
    sessions.banner = b"Welcome to node1\n"
    result = bring_up(sessions)
    assert [outcome.kind for outcome in result.outcomes] == [NO_ANSWER, NOT_BEGUN, NOT_BEGUN]
    assert ("node2", "slurm-apply") not in sessions.commands()


@pytest.mark.parametrize("name", ALL)
def test_a_machine_that_falls_silent_afterwards_is_one_line(sessions: Sessions, name: str) -> None:
    asked = {"node1": 6, "node2": 3, "node3": 3}
    sessions.silent = lambda node, call: node == name and call == asked[name]
    result = bring_up(sessions)
    assert [outcome.kind for outcome in result.outcomes] == [ANSWERED] * 3
    assert {machine: [line.path for line in lines] for machine, lines in result.problems.items()} == {name: [name]}
