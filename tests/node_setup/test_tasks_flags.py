"""Every flag that changes what a task does to nodes reaches the run, and what a task prints and ends with once its nodes have
answered; the answers are written down here, no node is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fabric.main import make_program

from node_setup import reboot
from node_setup.allreduce import launch
from node_setup.allreduce.launch import Reduction
from node_setup.answers import parse
from node_setup.fleet.hosts import Node
from node_setup.fleet.inventory import Inventory
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.options import Options
from node_setup.fleet.pool import ANSWERED, Concurrency, Outcome
from node_setup.fleet.protocol import Agent
from node_setup.fleet.run import FleetRun
from node_setup.fleet.transport import Connections
from node_setup.request import Tuning

NODES = ("--nodes", "127.0.0.1:1")


@dataclass
class Seen:
    """What a task asked for, and what its nodes say."""

    tuning: Tuning = field(default_factory=Tuning)
    commands: list[str] = field(default_factory=list)
    reboots: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: tuple[str, ...] = ()


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()

    class Recorded(FleetRun):
        def call_agents(self, command: str) -> list[Outcome]:
            seen.commands.append(command)
            return seen.outcomes

    def prepare(context: object, flags: object, tuning: Tuning, hosts: object) -> FleetRun:
        seen.tuning = tuning
        connections, nodes = Connections(KnownHosts(str(tmp_path / "known"))), tuple(one.node for one in seen.outcomes)
        found = Inventory(nodes or (Node("n1", "n1"),))
        return Recorded(Options(), found, tuning, connections, Concurrency(), Agent(b"", ""), seen.notes)

    def rebooted(run: FleetRun, **options: Any) -> list[Outcome]:
        seen.reboots.append(options)
        return []

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("node_setup.fleet.run.prepare", prepare)
    monkeypatch.setattr(reboot, "reboot", rebooted)
    return seen


def called(*words: str) -> object:
    """The exit code of a task that asks this one node."""
    try:
        make_program().run(["fab", *words, *NODES])
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize(
    ("words", "force", "allow_reboot"),
    [
        (("node-tune",), False, False),
        (("node-tune", "--force"), True, False),
        (("node-tune", "--allow-reboot"), False, True),
        (("node-reboot",), False, False),
        (("node-reboot", "--force"), True, False),
    ],
)
def test_force_and_allow_reboot_are_sent_only_when_given(
    seen: Seen, words: tuple[str, ...], force: bool, allow_reboot: bool
) -> None:
    called(*words)
    assert (seen.tuning.force, seen.tuning.allow_reboot) == (force, allow_reboot)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("node-tune", "--check"), "plan"),
        (("--dry", "node-tune"), "plan"),
        (("node-tune",), "tune"),
        (("node-verify",), "verify --tier fast"),
        (("node-verify", "--tier", "facts"), "verify --tier facts"),
    ],
)
def test_task_sends_its_flags_and_tune_check_sends_plan(seen: Seen, words: tuple[str, ...], command: str) -> None:
    called(*words)
    assert seen.commands == [command]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("node-reboot", "--check", "--wait", "77"), {"check": True, "wait": "77"}),
        (("--dry", "node-reboot"), {"check": True, "wait": "900"}),
        (("node-reboot",), {"check": False, "wait": "900"}),
    ],
)
def test_a_reboot_that_only_looks_reboots_nothing(seen: Seen, words: tuple[str, ...], asked: dict[str, Any]) -> None:
    called(*words)
    assert seen.reboots == [asked]


def verified(name: str, kernel: str, drain: str | None = None) -> Outcome:
    said: dict[str, Any] = {
        "version": 1,
        "ready": not drain,
        "drain": drain,
        "results": [],
        "facts_digest": {"kernel": kernel},
    }
    return Outcome(Node(name, name, "train"), ANSWERED, status=2 if drain else 0, answer=parse({**said, "jobs": []}))


KERNELS = [verified(f"n{number}", "6.5" if number == 3 else "6.8") for number in range(4)]
NOTES = ("i-7 left out: Pending", "--limit: 4 of 9 nodes")
Out = pytest.CaptureFixture[str]


def ended(seen: Seen, outcomes: list[Outcome], capsys: Out, *words: str) -> tuple[object, str]:
    """The exit code of a task whose nodes say this, and what it printed."""
    seen.outcomes = outcomes
    return called(*words), capsys.readouterr().out


def test_verify_tells_who_is_unlike_the_others(seen: Seen, capsys: Out) -> None:
    code, out = ended(seen, KERNELS, capsys, "node-verify")
    assert (code, "  train: kernel: n3: 6.5; most have 6.8" in out.splitlines()) == (0, True)
    said = json.loads(ended(seen, KERNELS, capsys, "node-verify", "--json")[1])
    assert [(one["key"], one["hosts"]) for one in said["odd"]] == [("kernel", {"n3": "6.5"})]


@pytest.mark.parametrize(("unable", "code"), [(False, 0), (True, 4)])
def test_an_all_reduce_that_is_not_good_is_in_the_exit_code(
    seen: Seen, capsys: Out, monkeypatch: pytest.MonkeyPatch, unable: bool, code: int
) -> None:
    why = "no all_reduce_perf on n0"
    monkeypatch.setattr(launch, "all_reduce", lambda *of: [Reduction("train", None, (why,), unable=unable)])
    found, out = ended(seen, KERNELS, capsys, "node-verify", "--all-reduce")
    assert (found, why in out) == (code, True)
    said = json.loads(ended(seen, KERNELS, capsys, "node-verify", "--all-reduce", "--json")[1])
    assert (said["exit"], len(said["all_reduce"])) == (code, 1)


@pytest.mark.parametrize("task", ["node-facts", "node-tune", "node-verify"])
def test_what_concerns_no_single_node_is_told_before_the_table(seen: Seen, capsys: Out, task: str) -> None:
    seen.notes = NOTES
    assert ended(seen, KERNELS, capsys, task)[1].splitlines()[:2] == list(NOTES)
    assert json.loads(ended(seen, KERNELS, capsys, task, "--json")[1])["notes"] == list(NOTES)


def test_drain_reasons_are_printed_alone(seen: Seen, capsys: Out) -> None:
    reason = "lustrain: efa-devices: 30 of 32; action=REPLACE"
    found = ended(seen, [*KERNELS, verified("n9", "6.8", reason)], capsys, "node-verify", "--drain-reasons")
    assert found == (4, f"n9 {reason}\n")
