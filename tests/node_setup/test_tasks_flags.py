"""Every flag that changes what a task does to nodes reaches the run: none is read and dropped."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fabric.main import make_program

from node_setup import reboot, tasks
from node_setup.fleet.hosts import Node
from node_setup.fleet.inventory import Inventory
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.options import Options
from node_setup.fleet.pool import Outcome, Pace
from node_setup.fleet.protocol import Agent
from node_setup.fleet.run import FleetRun
from node_setup.fleet.transport import Ways
from node_setup.request import Tuning

NODES = ("--nodes", "127.0.0.1:1")


def called(words: list[str]) -> None:
    with suppress(SystemExit):
        make_program().run(["fab", *words])


@dataclass
class Seen:
    """What a task asked for."""

    tuning: Tuning = field(default_factory=Tuning)
    commands: list[str] = field(default_factory=list)
    reboots: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()

    class Recorded(FleetRun):
        def ask(self, command: str) -> list[Outcome]:
            seen.commands.append(command)
            return []

    def prepare(context: object, flags: object, tuning: Tuning, hosts: object) -> FleetRun:
        seen.tuning = tuning
        ways = Ways(KnownHosts(str(tmp_path / "known")))
        return Recorded(Options(), Inventory((Node("n1", "n1"),)), tuning, ways, Pace(), Agent(b"", ""))

    def rebooted(run: FleetRun, **options: Any) -> list[Outcome]:
        seen.reboots.append(options)
        return []

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(tasks, "prepare", prepare)
    monkeypatch.setattr(reboot, "reboot", rebooted)
    return seen


def test_force_and_allow_reboot_are_asked_for_only_where_they_are_given(seen: Seen) -> None:
    called(["node-tune", *NODES])
    assert (seen.tuning.force, seen.tuning.allow_reboot) == (False, False)
    called(["node-tune", *NODES, "--force"])
    assert (seen.tuning.force, seen.tuning.allow_reboot) == (True, False)
    called(["node-tune", *NODES, "--allow-reboot"])
    assert (seen.tuning.force, seen.tuning.allow_reboot) == (False, True)
    called(["node-reboot", *NODES])
    assert not seen.tuning.force
    called(["node-reboot", *NODES, "--force"])
    assert seen.tuning.force


@pytest.mark.parametrize("words", [("node-tune", *NODES, "--check"), ("--dry", "node-tune", *NODES)])
def test_a_tune_that_only_looks_asks_for_a_plan(seen: Seen, words: tuple[str, ...]) -> None:
    called(list(words))
    assert seen.commands == ["plan"]
    called(["node-tune", *NODES])
    assert seen.commands == ["plan", "tune"]


@pytest.mark.parametrize("words", [("node-reboot", *NODES, "--check"), ("--dry", "node-reboot", *NODES)])
def test_a_reboot_that_only_looks_reboots_nothing(seen: Seen, words: tuple[str, ...]) -> None:
    called([*words, "--wait", "77"])
    assert seen.reboots == [{"check": True, "wait": "77"}]
    called(["node-reboot", *NODES])
    assert seen.reboots[1:] == [{"check": False, "wait": "900"}]


def test_the_tier_of_a_verify_is_the_one_that_was_given(seen: Seen) -> None:
    for words, tier in (((), "fast"), (("--tier", "facts"), "facts")):
        called(["node-verify", *NODES, *words])
        assert seen.commands[-1] == f"verify --tier {tier}"
