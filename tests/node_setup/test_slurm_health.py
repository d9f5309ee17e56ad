"""What `fab slurm-up` says of a Slurm that is not in order, and of a Cluster that names no controller for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import Problem
from node_setup.fleet.hosts import Node
from node_setup.slurm import health
from node_setup.slurm.machines import SlurmMachine, controller_of
from tests.node_setup.slurm_machines import GROUP, cluster, machines, plant, report

IDLE = {"state": "IDLE", "reason": None, "gres": "gpu:h100:2(S:0)"}
UP = {unit: {"active": "active"} for unit in ("munge.service", "slurmctld.service", "slurmd.service")}


@pytest.fixture
def pair(tmp_path: Path) -> list[SlurmMachine]:
    """A controller, and a node with two GPUs."""
    told = [report("node1", plant(tmp_path / "1", 1, 2, 1)), report("node2", plant(tmp_path / "2", 1, 2, 1, gpus=2))]
    return machines(cluster({"train": {**GROUP, "gpus": 2}}), told)


def lines(
    pair: list[SlurmMachine], node: Any = IDLE, error: str | None = None, **changed: Any
) -> list[tuple[str, str]]:
    """The machine and the path of each line, where the facts of node2 have `changed`."""
    facts = {machine.node.name: {**machine.facts, "units": UP} for machine in pair}
    facts["node2"] |= changed
    states = {"error": error, "nodes": {} if node is None else {"node2": node}}
    found = health.problems(pair, facts, states)
    return [(name, line.path) for name, told in found.items() for line in told]


@pytest.mark.parametrize("state", ["IDLE", "MIXED", "ALLOCATED", "ALLOCATED+COMPLETING", "IDLE+CLOUD"])
def test_a_node_that_takes_jobs_is_in_order(pair: list[SlurmMachine], state: str) -> None:
    assert lines(pair, IDLE | {"state": state}) == []


@pytest.mark.parametrize(
    "state", ["UNKNOWN*", "DOWN", "DOWN+NOT_RESPONDING", "IDLE+DRAIN", "MIXED+DRAIN", "IDLE+DRAIN+INVALID_REG", "IDLE*"]
)
def test_a_node_that_takes_no_jobs_is_one_line(pair: list[SlurmMachine], state: str) -> None:
    assert lines(pair, IDLE | {"state": state}) == [("node2", "Slurm's node node2")]


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"node": None}, "Slurm's node node2"),
        ({"node": IDLE | {"gres": "gpu:h100:1"}}, "devices of node2"),
        ({"node": IDLE | {"gres": None}}, "devices of node2"),
        ({"munge_key": "1" * 64}, "munge key of node2"),
        ({"munge_key": None}, "munge key of node2"),
        ({"munge": "munge: Error: Failed to access the socket"}, "munge of node2"),
        ({"units": UP | {"slurmd.service": {"active": "failed"}}}, "slurmd.service of node2"),
    ],
)
def test_what_is_not_in_order_is_one_line(pair: list[SlurmMachine], changed: dict[str, Any], path: str) -> None:
    assert lines(pair, **changed) == [("node2", path)]


def test_a_silent_controller_is_one_line_and_blames_no_node(pair: list[SlurmMachine]) -> None:
    assert lines(pair, None, "slurm_load_node error: Unable to contact slurm controller") == [
        ("node1", "slurmctld of node1")
    ]


@pytest.mark.parametrize(
    ("slurm", "more", "path"),
    [
        ({"controller": None}, {}, "cluster.slurm.controller"),
        ({"controller": "10.9.9.9"}, {}, "cluster.slurm.controller"),
        ({"controller": None}, {"backend": "hyperpod-slurm"}, "cluster.backend"),
    ],
)
def test_a_controller_has_to_be_one_of_the_machines(slurm: dict[str, Any], more: dict[str, Any], path: str) -> None:
    found = controller_of(cluster(slurm=slurm, **more), [Node("node1", "10.0.0.11")])
    assert isinstance(found, Problem)
    assert found.path == path


def test_the_controller_is_known_by_name_or_address() -> None:
    node = Node("node1", "10.0.0.11")
    for named in ("node1", "10.0.0.11"):
        assert controller_of(cluster(slurm={"controller": named}), [node]) is node
