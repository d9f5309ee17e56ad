"""The rehearsal's node stages: what they promise is broken where it does not hold, and without a lab nothing is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_setup.agent import owned
from rehearsal import nodes
from rehearsal.lab.nodes import Lab
from tests.lab.judged import judged
from tests.lab.nodes import StartLab

pytestmark = pytest.mark.slow

WHY = "a lab of nodes needs root: namespaces and overlay mounts"


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "why_not", lambda: WHY)
    monkeypatch.delenv("LUSTRAIN_REQUIRE", raising=False)


def fleet_of(lab: Lab, folder: Path) -> nodes.Fleet:
    for node in lab.nodes:
        node.metadata()
    return nodes.Fleet(lab, folder)


def test_nodes_tuned_replaced_and_judged_keep_every_promise(lab: StartLab, tmp_path: Path) -> None:
    fleet = fleet_of(lab(2), tmp_path)
    played = [judged(run()) for run in (fleet.tune, fleet.replace, fleet.verify)]
    assert [promise for _, promises in played for promise in promises if not promise.kept] == []
    assert [len(promises) for _, promises in played] == [2, 2, 2]


def test_empty_first_pass_or_busy_second_one_breaks_its_promise(
    lab: StartLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of(lab(1), tmp_path)
    (node,) = fleet.lab.nodes
    fleet.fab("node-tune")
    _, (brought, nothing) = judged(fleet.tune())
    assert (brought.kept, nothing.kept) == (False, True)
    plain = fleet.fab

    def drifting(task: str) -> nodes.NodeTaskResult:
        node.exec("sh", "-c", "echo 65530 >/proc/sys/vm/max_map_count")
        return plain(task)

    monkeypatch.setattr(fleet, "fab", drifting)
    _, (brought, nothing) = judged(fleet.tune())
    assert (brought.kept, nothing.kept) == (True, False)

    told: list[str] = []

    def careless(task: str) -> nodes.NodeTaskResult:
        told.append(task)
        said = plain(task)
        if len(told) == 2:
            node.exec("chmod", "600", owned.LIMITS)
        return said

    monkeypatch.setattr(fleet, "fab", careless)
    _, (_, nothing) = judged(fleet.tune())
    assert not nothing.kept
    assert "files changed" in nothing.figure


def test_a_node_that_was_never_blank_proves_nothing(
    lab: StartLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of(lab(2), tmp_path)
    fleet.fab("node-tune")
    monkeypatch.setattr(fleet.lab.nodes[-1], "replace", lambda: None)
    _, (identical, _) = judged(fleet.replace())
    assert not identical.kept


def test_replaced_node_that_is_not_tuned_breaks_its_promises(
    lab: StartLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "FIRST_BOOT", ("true",))
    fleet = fleet_of(lab(2), tmp_path)
    fleet.fab("node-tune")
    _, (identical, nothing_to_do) = judged(fleet.replace())
    assert not identical.kept
    assert owned.AGENT in identical.figure
    assert not nothing_to_do.kept
    assert "exit 4" in nothing_to_do.figure
    _, (ready, told) = judged(fleet.verify())
    assert not ready.kept
    assert "1 of 2 ready" in ready.figure
    assert not told.kept


def test_one_byte_or_one_mode_that_differs_breaks_the_promise(
    lab: StartLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = f'{nodes.FIRST_BOOT[-2]}; echo "#" >>{owned.SYSCTL}; chmod 600 {owned.LIMITS}'
    monkeypatch.setattr(nodes, "FIRST_BOOT", (*nodes.FIRST_BOOT[:-2], spoilt, nodes.FIRST_BOOT[-1]))
    fleet = fleet_of(lab(2), tmp_path)
    fleet.fab("node-tune")
    _, (identical, _) = judged(fleet.replace())
    assert (identical.kept, identical.figure) == (False, f"differ: {owned.LIMITS}, {owned.SYSCTL}")


@pytest.mark.usefixtures("no_lab")
def test_without_a_lab_this_machine_is_read_and_report_says_why(tmp_path: Path) -> None:
    with nodes.scenarios(tmp_path / "nodes") as scenarios:
        (scenario,) = scenarios
        outcome, (promise,) = judged(scenario.run())
    assert outcome.startswith(WHY)
    assert promise.kept, promise.figure
    assert "simulated" not in f"{scenario.real} {scenario.emulated}"


@pytest.mark.usefixtures("no_lab")
def test_where_everything_is_required_a_missing_lab_breaks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUSTRAIN_REQUIRE", "all")
    with nodes.scenarios(tmp_path / "nodes") as (scenario,):
        _, promises = judged(scenario.run())
    assert [(promise.kept, promise.figure) for promise in promises][1:] == [(False, WHY)]


@pytest.mark.usefixtures("no_lab")
def test_file_of_ours_that_appears_meanwhile_breaks_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = nodes.fab

    def writes(folder: Path, task: str, *flags: str) -> tuple[int, dict[str, object]]:
        (tmp_path / "owned").touch()
        return look(folder, task, *flags)

    monkeypatch.setattr(nodes, "OURS", (str(tmp_path / "owned"),))
    monkeypatch.setattr(nodes, "fab", writes)
    with nodes.scenarios(tmp_path / "nodes") as (scenario,):
        _, (promise,) = judged(scenario.run())
    assert not promise.kept
