"""node-reboot believes another boot and a plan without a change, nothing else; the nodes are answers written down here."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from invoke.context import MockContext
from invoke.exceptions import Exit

from lustrain.cluster import parse
from lustrain.problem import UserError
from node_setup import reboot as rebooting
from node_setup import tasks
from node_setup.fleet import run
from node_setup.fleet.faults import HOST_KEY, TIMEOUT, UNREACHABLE, Fault
from node_setup.fleet.hosts import THIS_MACHINE, Node
from node_setup.fleet.inventory import Inventory
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.options import Options
from node_setup.fleet.pool import ANSWERED, Concurrency, Outcome
from node_setup.fleet.protocol import Agent
from node_setup.fleet.run import FleetRun
from node_setup.fleet.session import Completed
from node_setup.fleet.transport import Connections, Deadline
from node_setup.request import Tuning

AWAY = Fault(UNREACHABLE, "connection refused", passing=True)


class Node1:
    """Each connection is the next entry: a fault, or what the one command on it gives; it keeps the commands."""

    root, user = True, "root"

    def __init__(self, *script: Fault | Completed) -> None:
        self.script = list(script)
        self.commands: list[str] = []

    def execute(self, command: str, stdin: bytes, seconds: float) -> Completed:
        self.commands.append(command)
        return self._next

    def connect(self, node: Node, deadline: Deadline) -> Any:
        one = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(one, Fault):
            raise one
        self._next = one
        return self

    def close(self) -> None:
        """Nothing is open."""


SAID = {"version": 1, "agent": "0" * 64}


def boot(number: int, status: int = 0, **more: Any) -> Completed:
    said = {**SAID, "boot": {"boot_id": f"b{number}", "pid1_start": number}, "refused": None, **more}
    return Completed(status, json.dumps(said).encode(), b"")


def plan(status: int) -> Completed:
    return Completed(status, json.dumps({**SAID, "rows": [], "errors": []}).encode(), b"")


SENT = Completed(0, b"", b"")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebooting, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(rebooting, "SETTLE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(rebooting, "LEAST_S", 29.0)


@pytest.fixture
def rebooted(tmp_path: Path) -> Callable[..., Outcome]:
    def run(node: Node1, *, check: bool = False, wait: str = "60") -> Outcome:
        connections = Connections(KnownHosts(str(tmp_path / "known")))
        connections.connect = node.connect  # type: ignore[method-assign]
        made = FleetRun(
            Options(), Inventory((Node("n1", "n1"),)), Tuning(), connections, Concurrency(), Agent(b"", "0" * 64)
        )
        return rebooting.reboot(made, check=check, wait=wait)[0]

    return run


def test_node_is_back_when_a_new_boot_is_in_sync(rebooted: Any) -> None:
    node = Node1(boot(1), SENT, boot(1), AWAY, AWAY, boot(2), plan(2), plan(0))
    outcome = rebooted(node)
    assert (outcome.kind, outcome.status) == (ANSWERED, 0)
    assert outcome.answer.did.startswith("rebooted, back after")
    assert [("reboot-check" in one, " plan " in one) for one in node.commands] == [
        (True, False), (False, False), (True, False), (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert "systemctl reboot || reboot" in node.commands[1]
    assert "</dev/null" in node.commands[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "kind", "status", "why"),
    [
        ((boot(1), SENT, boot(2), plan(2)), ANSWERED, 2, ""),
        ((boot(1), SENT, boot(1)), TIMEOUT, None, "it never went down"),
        ((boot(1), SENT, AWAY), TIMEOUT, None, "unreachable: connection refused"),
        ((boot(1), SENT, Fault(HOST_KEY, "its host key has changed")), HOST_KEY, None, "has changed"),
    ],
    ids=["back, untuned", "the same boot", "stays away", "another machine"],
)
def test_a_node_that_does_not_come_back_as_it_should_is_told(
    script: tuple[Fault | Completed, ...], kind: str, status: int | None, why: str, rebooted: Any
) -> None:
    outcome = rebooted(Node1(*script), wait="30")
    assert (outcome.kind, outcome.status, why in outcome.why) == (kind, status, True)


def test_a_running_job_is_a_refusal_and_no_reboot(rebooted: Any) -> None:
    node = Node1(boot(1, 4, refused="a job runs: slurm 12"))
    assert (rebooted(node).status, len(node.commands)) == (4, 1)


def test_check_reboots_nothing(rebooted: Any) -> None:
    node = Node1(boot(1))
    assert (rebooted(node, check=True).answer.did, len(node.commands)) == ("would be rebooted", 1)


def on_hyperpod(tmp_path: Path, answers: dict[str, Completed | Fault], region: str | None = "us-west-2") -> FleetRun:
    """Nodes by name, each with its one answer; those called head… are controllers. It keeps nothing of what was asked."""
    described = {"name": "c", "backend": "hyperpod-slurm", "region": region, "nodes": {"hyperpod_cluster": "pod"}}
    groups = {
        "train": {"type": "p5.48xlarge", "count": 1},
        "controller": {"type": "c5.2xlarge", "count": 1, "role": "controller"},
    }
    fixed = {"reach": {"via": "ssm"}, "runs_uri": "s3://b/", "capacity": {"mode": "spot"}}
    found = tuple(
        Node(name, name, "controller" if name.startswith("head") else "train", f"i-{name}") for name in answers
    )
    connections = Connections(KnownHosts(str(tmp_path / "known")))
    connections.connect = lambda node, deadline: Node1(answers[node.name]).connect(node, deadline)  # type: ignore[method-assign]
    cluster = parse({**described, "groups": groups, **fixed})
    return FleetRun(Options(), Inventory(found, cluster), Tuning(), connections, Concurrency(), Agent(b"", "0" * 64))


def test_of_hyperpod_only_idle_workers_are_named_to_reboot(tmp_path: Path) -> None:
    asked = Fault(HOST_KEY, "the controller is asked for nothing")
    made = on_hyperpod(
        tmp_path, {"head": asked, "n1": boot(1), "n2": boot(1, 4, refused="a job runs: slurm 12"), "n3": AWAY}
    )
    assert rebooting.belongs_to_hyperpod(made)
    left = rebooting.plan_hyperpod_reboot(made)
    assert left.commands == [
        "aws sagemaker batch-reboot-cluster-nodes --region us-west-2 --cluster-name pod --node-ids i-n1"
    ]
    assert [(one.node.name, one.kind, one.status) for one in left.outcomes] == [
        ("n1", ANSWERED, 0),
        ("n2", ANSWERED, 4),
        ("n3", UNREACHABLE, None),
    ]
    assert left.lines[0] == "left out, since they are not workers: head"


def test_hyperpod_takes_twenty_five_nodes_at_once(tmp_path: Path) -> None:
    left = rebooting.plan_hyperpod_reboot(on_hyperpod(tmp_path, {f"n{number}": boot(1) for number in range(51)}, None))
    counts = [command.partition("--node-ids ")[2].count("i-") for command in left.commands]
    assert counts == [25, 25, 1]
    assert "--region" not in left.commands[0]


def test_where_every_worker_has_a_job_no_command_is_named(tmp_path: Path) -> None:
    left = rebooting.plan_hyperpod_reboot(
        on_hyperpod(tmp_path, {"head": boot(1), "n1": boot(1, 4, refused="a job runs")})
    )
    assert (left.commands, left.lines[-1]) == ([], "nothing was rebooted: no worker may be rebooted now")


@pytest.mark.parametrize(("check", "code"), [(False, 1), (True, 0)])
def test_hyperpod_reboot_is_left_to_hyperpod_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], check: bool, code: int
) -> None:
    monkeypatch.setattr(run, "prepare", lambda *of: on_hyperpod(tmp_path, {"n1": boot(1)}))
    with pytest.raises(Exit) if code else nullcontext() as ended:
        tasks.node_reboot.body(MockContext(), check=check)
    assert (ended.value.code if ended else 0) == code
    assert "--node-ids i-n1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("chosen", "asked"), [({}, {"n1"}), ({"group": "train,login"}, {"n1", "front"}), ({"node": "*"}, {"n1", "front"})]
)
def test_logins_are_rebooted_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], asked: set[str]
) -> None:
    node, names = Node1(boot(1)), set()
    groups = {
        "train": {"type": "g6e.48xlarge", "count": 1},
        "login": {"type": "m7i.large", "count": 1, "role": "login"},
    }
    fixed = {"reach": {"via": "ssm"}, "runs_uri": "s3://b/", "capacity": {"mode": "spot"}}
    nodes = {"auto_scaling_groups": ["c-train-gang", "c-login-gang"]}
    there = parse({"name": "c", "backend": "ec2", "region": "us-west-2", "nodes": nodes, "groups": groups, **fixed})

    def connect(to: Node, deadline: Deadline) -> Any:
        names.add(to.name)
        return node.connect(to, deadline)

    connections = Connections(KnownHosts(str(tmp_path / "known")))
    connections.connect = connect  # type: ignore[method-assign]
    found = Inventory((Node("n1", "n1", "train"), Node("front", "front", "login")), there)
    made = FleetRun(Options(), found, Tuning(), connections, Concurrency(), Agent(b"", "0" * 64))
    monkeypatch.setattr(run, "prepare", lambda *of: made)
    tasks.node_reboot.body(MockContext(), check=True, **chosen)
    assert names == asked


def test_this_machine_is_not_rebooted_and_a_wait_is_a_number(tmp_path: Path) -> None:
    connections = Connections(KnownHosts(str(tmp_path / "known")))
    made = FleetRun(Options(), Inventory((THIS_MACHINE,)), Tuning(), connections, Concurrency(), Agent(b"", ""))
    with pytest.raises(UserError, match="this machine"):
        rebooting.reboot(made, check=False, wait="900")
    with pytest.raises(UserError, match="--wait = 'soon'"):
        rebooting.reboot(made, check=False, wait="soon")
