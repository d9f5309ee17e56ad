"""What a task prints and ends with once its nodes have answered; the answers are written down here, no node is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invoke.context import MockContext
from invoke.exceptions import Exit

from node_setup import tasks
from node_setup.allreduce import launch
from node_setup.allreduce.launch import Reduction
from node_setup.answers import parse
from node_setup.fleet.hosts import Node
from node_setup.fleet.inventory import Inventory
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.options import Options
from node_setup.fleet.pool import ANSWERED, Outcome, Pace
from node_setup.fleet.protocol import Agent
from node_setup.fleet.run import FleetRun
from node_setup.fleet.transport import Ways
from node_setup.request import Tuning

Called = Callable[..., tuple[int, str]]


def verified(name: str, kernel: str) -> Outcome:
    said = {"version": 1, "ready": True, "drain": None, "results": [], "facts_digest": {"kernel": kernel}, "jobs": []}
    return Outcome(Node(name, name, "train"), ANSWERED, status=0, answer=parse(said))


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """The exit code of a task and what it printed, with these outcomes and notes."""

    def call(task: Any, outcomes: list[Outcome], notes: tuple[str, ...] = (), **given: Any) -> tuple[int, str]:
        class Answered(FleetRun):
            def ask(self, command: str) -> list[Outcome]:
                return outcomes

        nodes = tuple(one.node for one in outcomes)
        ways = Ways(KnownHosts(str(tmp_path / "known")))
        run = Answered(Options(), Inventory(nodes), Tuning(), ways, Pace(), Agent(b"", ""), notes)
        monkeypatch.setattr(tasks, "prepare", lambda *of: run)
        code = 0
        try:
            task.body(MockContext(), **given)
        except Exit as ended:
            code = ended.code
        return code, capsys.readouterr().out

    return call


KERNELS = [verified(f"n{number}", "6.5" if number == 3 else "6.8") for number in range(4)]
NOTES = ("i-7 left out: Pending", "--limit: 4 of 9 nodes")


def test_verify_tells_who_is_unlike_the_others(called: Called) -> None:
    code, out = called(tasks.node_verify, KERNELS)
    assert (code, "  train: kernel: n3: 6.5; most have 6.8" in out.splitlines()) == (0, True)
    said = json.loads(called(tasks.node_verify, KERNELS, json=True)[1])
    assert [(one["key"], one["hosts"]) for one in said["odd"]] == [("kernel", {"n3": "6.5"})]


@pytest.mark.parametrize(("unable", "code"), [(False, 0), (True, 4)])
def test_an_all_reduce_that_is_not_good_is_in_the_exit_code(
    called: Called, monkeypatch: pytest.MonkeyPatch, unable: bool, code: int
) -> None:
    why = "no all_reduce_perf on n0"
    monkeypatch.setattr(launch, "all_reduce", lambda *of: [Reduction("train", None, (why,), unable=unable)])
    found, out = called(tasks.node_verify, KERNELS, all_reduce=True)
    assert (found, why in out) == (code, True)
    said = json.loads(called(tasks.node_verify, KERNELS, all_reduce=True, json=True)[1])
    assert (said["exit"], len(said["all_reduce"])) == (code, 1)


@pytest.mark.parametrize("task", [tasks.node_facts, tasks.node_tune, tasks.node_verify])
def test_what_concerns_no_single_node_is_told_before_the_table(called: Called, task: Any) -> None:
    assert called(task, KERNELS, NOTES)[1].splitlines()[:2] == list(NOTES)
    assert json.loads(called(task, KERNELS, NOTES, json=True)[1])["notes"] == list(NOTES)


def test_reasons_to_drain_stand_alone_for_who_reads_them_line_by_line(called: Called) -> None:
    bad = verified("n9", "6.8")
    reason = "lustrain: efa-devices: 30 of 32; action=REPLACE"
    sick = Outcome(
        bad.node, ANSWERED, status=2, answer=parse({**bad.answer.to_json(), "ready": False, "drain": reason})
    )
    assert called(tasks.node_verify, [*KERNELS, sick], drain_reasons=True) == (4, f"n9 {reason}\n")
