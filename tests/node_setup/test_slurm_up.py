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
    states: dict[str, str] = field(default_factory=lambda: {"node2": "IDLE", "node3": "IDLE"})
    requeued: list[str] = field(default_factory=list)
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
            more = {"gres": None, "reason": None}
            nodes = {name: {"state": state, **more} for name, state in self.sessions.states.items()}
            answer["slurm"] = {"error": None, "nodes": nodes, "requeued": self.sessions.requeued}
        else:
            status = int(self.node == self.sessions.failing)
            body = json.loads(stdin)
            if not body["check"] and (self.node == "node1" or body["munge_key"]):
                self.sessions.facts[self.node]["munge_key"] = DIGEST
            answer["rows"] = [ROW | {"status": "failed" if status else "changed"}]
        return Completed(status, json.dumps(answer).encode(), b"")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    """Machines that have no key yet. Their daemons run already, so that they are in order after the run."""
    daemons = {"node1": "slurmctld.service", "node2": "slurmd.service", "node3": "slurmd.service"}
    told = {}
    for report in small_machines(tmp_path):
        units = report.facts["units"] | {daemons[report.node.name]: {"active": "active"}}
        ours = {"conf": {"ours": True, "cluster": "lab"}, "munge_key": None, "units": units}
        told[report.node.name] = {**report.facts, **ours}
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
STATE = ("node1", "slurm-state")


def test_all_are_asked_then_the_controller_is_changed_first(sessions: Sessions) -> None:
    result = bring_up(sessions)
    assert [outcome.kind for outcome in result.outcomes] == [ANSWERED] * 3
    assert result.problems == {}
    head = [("node1", "slurm-apply"), ("node1", "slurm-facts"), ("node1", "cat")]
    others = [("node2", "slurm-apply"), ("node3", "slurm-apply")]
    assert sessions.commands() == [*ASKED, STATE, *head, *others, STATE, *ASKED]


def test_the_key_goes_to_the_others_by_standard_input_alone(sessions: Sessions) -> None:
    bring_up(sessions)
    encoded = base64.b64encode(KEY)
    assert [(node, verb) for node, verb, stdin in sessions.calls if encoded in stdin] == [
        ("node2", "slurm-apply"),
        ("node3", "slurm-apply"),
    ]
    assert not any(encoded.decode() in line or KEY.hex() in line for line in sessions.lines)


def test_the_key_goes_only_where_it_is_missing(sessions: Sessions) -> None:
    for name in ("node1", "node2"):
        sessions.facts[name]["munge_key"] = DIGEST
    bring_up(sessions)
    bodies = {node: json.loads(stdin) for node, verb, stdin in sessions.calls if verb == "slurm-apply"}
    assert [bool(bodies[name]["munge_key"]) for name in ("node2", "node3")] == [False, True]
    assert {bodies[name]["munge_digest"] for name in ("node2", "node3")} == {DIGEST}


def test_no_key_is_read_where_all_have_it(sessions: Sessions) -> None:
    for facts in sessions.facts.values():
        facts["munge_key"] = DIGEST
    assert bring_up(sessions).problems == {}
    assert ("node1", "cat") not in sessions.commands()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("state", "refused"),
    [
        ("ALLOCATED", True),
        ("MIXED+DRAIN", True),
        ("IDLE+COMPLETING", True),
        ("IDLE+DRAIN", False),
        ("DOWN+COMPLETING+NOT_RESPONDING", False),
    ],
)
def test_a_node_with_jobs_is_not_taken_out(sessions: Sessions, state: str, refused: bool, check: bool) -> None:
    sessions.states |= {"node2": "ALLOCATED", "node4": state}
    if not refused:
        bring_up(sessions, check=check)
        return
    with pytest.raises(UserError) as error:
        bring_up(sessions, check=check)
    assert error.value.problems[0].path == "Slurm's node node4"
    assert sessions.commands() == [*ASKED, STATE]


@pytest.mark.parametrize("leaves", [True, False])
def test_no_node_leaves_while_a_requeued_job_waits(sessions: Sessions, leaves: bool) -> None:
    """It may have had that node, and Slurm remembers it."""
    sessions.states |= {"node4": "DOWN+NOT_RESPONDING"} if leaves else {}
    sessions.requeued = ["7", "9_1"]
    if not leaves:
        assert bring_up(sessions).problems == {}
        return
    with pytest.raises(UserError) as error:
        bring_up(sessions)
    assert error.value.problems[0].path == "Slurm's requeued jobs"
    assert sessions.commands() == [*ASKED, STATE]


@pytest.mark.parametrize(
    ("joins", "former", "asked"),
    [(True, "node2", ["node2"]), (False, "node2", ["node1", "node2"]), (False, None, ["node1"])],
    ids=["a new machine", "one of its nodes", "the former one has left the Cluster"],
)
def test_a_controller_with_jobs_is_not_moved(
    sessions: Sessions, joins: bool, former: str | None, asked: list[str]
) -> None:
    head = sessions.facts["node1"]
    head["units"] |= {"slurmctld.service": {"active": "inactive"}}
    head["conf"] = None if joins else head["conf"]
    if former:
        sessions.facts[former]["units"] |= {"slurmctld.service": {"active": "active"}}
    sessions.states["node3"] = "MIXED"
    with pytest.raises(UserError) as error:
        bring_up(sessions)
    assert [line.path for line in error.value.problems if line.path] == ["Slurm's node node3"]
    assert sessions.commands() == [*ASKED, *[(name, "slurm-state") for name in asked]]


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
    assert sessions.commands() == [*ASKED, STATE, ("node1", "slurm-apply")]


def test_a_key_that_came_over_changed_is_given_to_nobody(sessions: Sessions) -> None:
    sessions.banner = b"Welcome to node1\n"
    result = bring_up(sessions)
    assert [outcome.kind for outcome in result.outcomes] == [NO_ANSWER, NOT_BEGUN, NOT_BEGUN]
    assert ("node2", "slurm-apply") not in sessions.commands()


@pytest.mark.parametrize("name", ALL)
def test_a_machine_that_falls_silent_afterwards_is_one_line(sessions: Sessions, name: str) -> None:
    asked = {"node1": 7, "node2": 3, "node3": 3}
    sessions.silent = lambda node, call: node == name and call == asked[name]
    result = bring_up(sessions)
    assert [outcome.kind for outcome in result.outcomes] == [ANSWERED] * 3
    assert {machine: [line.path for line in lines] for machine, lines in result.problems.items()} == {name: [name]}
