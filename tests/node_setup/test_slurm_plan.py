"""The plan of a Slurm: its files from the Cluster and facts, and what keeps machines from being one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import UserError
from node_setup.agent.slurm import facts
from node_setup.slurm import conf
from node_setup.slurm.machines import Report, SlurmMachine
from tests.node_setup.slurm_machines import (
    GROUP,
    cluster,
    machines,
    machines_or_problems,
    plant,
    report,
    small_machines,
)

UNITS = {unit: {"active": "inactive"} for unit in facts.UNITS}


@pytest.fixture
def small(tmp_path: Path) -> list[Report]:
    return small_machines(tmp_path)


@pytest.mark.parametrize(
    ("cgroups", "version", "tracking", "line"),
    [
        (["v2", "v2"], "22.05.8", "proctrack/cgroup", "CgroupPlugin=cgroup/v2"),
        (["v1", "v2"], "23.11.4", "proctrack/cgroup", "CgroupPlugin=autodetect"),
        (["v1", None], "22.05.8", "proctrack/linuxproc", "CgroupPlugin=cgroup/v1"),
        ([None, None], "24.11.3", "proctrack/linuxproc", "CgroupPlugin=disabled"),
        (["v2", "v2"], "21.08.5", "proctrack/linuxproc", None),
        (["v1", "v1"], "21.08.5", "proctrack/cgroup", None),
    ],
)
def test_control_groups_are_used_where_all_nodes_can(
    tmp_path: Path, cgroups: list[str | None], version: str, tracking: str, line: str | None
) -> None:
    host, there = plant(tmp_path, 1, 1, 1), cluster()
    # The controller runs no jobs here, and what it has does not matter.
    kinds = zip((1, 2, 3), [None, *cgroups], strict=True)
    made = machines(there, [report(f"node{number}", host, offered=version, cgroup=kind) for number, kind in kinds])
    files = conf.files(there, made)
    assert f"ProctrackType={tracking}\n" in files["slurm.conf"]
    named = [row for row in files["cgroup.conf"].splitlines() if row.startswith("CgroupPlugin")]
    assert named == ([] if line is None else [line])


def test_cores_of_a_gpu_are_numbered_as_slurm_does(tmp_path: Path) -> None:
    """Sockets whose cores the kernel numbers with gaps, as it does where some are fused off."""
    host = plant(tmp_path, 2, 2, 1, gpus=2)
    host.write(f"{facts.CPUS}/cpu1/topology/core_id", "9\n")
    host.write(f"{facts.CPUS}/cpu3/topology/core_id", "17\n")
    cores = facts.cores_of(host)
    assert facts.shape(cores) == {"cpus": 4, "sockets": 2, "cores": 2, "threads": 1}
    assert [gpu["cores"] for gpu in facts.gpus(host, cores)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("model", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA A10G", "a10g"), ("", "gpu")],
)
def test_a_gpu_type_is_the_name_of_its_model(model: str, name: str) -> None:
    assert facts.gpu_type(model) == name


def test_the_controller_runs_jobs_only_where_it_may(small: list[Report]) -> None:
    duties = [made.duties for made in machines(cluster(), small)]
    assert duties == [("controller",), ("compute",), ("compute",)]
    both = machines(cluster(slurm={"controller_runs_jobs": True}), small)
    assert [made.duties for made in both] == [("controller", "compute"), ("compute",), ("compute",)]


def test_a_login_node_gets_the_programs_and_runs_no_jobs(small: list[Report]) -> None:
    groups = {"train": GROUP, "login": {"type": "m7i.large", "count": 1, "role": "login"}}
    told = [Report(one.node, one.facts | {"group": "login" if at == 2 else "train"}) for at, one in enumerate(small)]
    made = machines(cluster(groups), told)
    assert made[2].duties == ("client",)
    assert "node3" not in conf.files(cluster(groups), made)["slurm.conf"]


@pytest.mark.parametrize(
    ("number", "facts_", "path"),
    [
        (2, {"offered": None}, "Slurm of node2"),
        (2, {"offered": "20.11.9"}, "Slurm of node2"),
        (2, {"offered": "23.11.4"}, "Slurm of node2"),
        (1, {"installed": {"slurmctld": "24.05.2", "slurmd": None}}, "Slurm of node2"),
        (2, {"host": "node1"}, "host name of node2"),
        (2, {"host": "localhost"}, "host name of node2"),
        (2, {"conf": {"ours": False, "cluster": "theirs"}}, "/etc/slurm/slurm.conf of node2"),
        (2, {"units": UNITS | {"slurmd.service": {"active": "active"}}}, "slurmd.service of node2"),
        (2, {"units": UNITS | {"slurmctld.service": {"active": "reloading"}}}, "slurmctld.service of node2"),
        (2, {"units": UNITS | {"slurmd.service": {"active": None}}}, "slurmd.service of node2"),
        (2, {"cpu": None}, "processors and memory of node2"),
        (2, {"gpus": [{"minor": 0, "type": "h100", "cores": []}]}, "GPUs of node2"),
    ],
)
def test_what_keeps_a_machine_out_is_one_line(
    small: list[Report], number: int, facts_: dict[str, Any], path: str
) -> None:
    one = small[number - 1]
    small[number - 1] = Report(one.node, one.facts | facts_)
    lines = machines_or_problems(cluster(), small)
    assert path in [line.path for line in lines]
    assert all("fix: " in line for line in lines)


def test_group_that_is_not_known_and_a_loopback_address_are_lines(small: list[Report]) -> None:
    small[1] = Report(replace(small[1].node, group=None, address="127.0.0.1"), small[1].facts | {"group": None})
    there = cluster({name: {**GROUP, "partition": name} for name in ("a", "b")})
    paths = {line.path for line in machines_or_problems(there, small)}
    assert {"group of node2", "address of node2"} <= paths


def test_a_running_daemon_of_our_slurm_is_let_in(small: list[Report]) -> None:
    ours = {"conf": {"ours": True, "cluster": "lab"}, "units": UNITS | {"slurmd.service": {"active": "active"}}}
    small[1] = Report(small[1].node, small[1].facts | ours)
    assert all(isinstance(one, SlurmMachine) for one in machines_or_problems(cluster(), small))


@pytest.mark.parametrize(
    ("controller", "node", "fits"),
    [
        ("23.11.4", "22.05.8", True),
        ("24.05.1", "22.05.8", False),
        ("24.11.1", "23.02.7", True),
        ("25.05.0", "23.11.4", True),
        ("25.05.0", "23.02.7", False),
    ],
)
def test_a_node_may_be_as_old_as_its_controller_bears(
    small: list[Report], controller: str, node: str, fits: bool
) -> None:
    """The controllers before 24.11 bear two older releases, the later ones three."""
    small = [Report(one.node, one.facts | {"offered": node if at else controller}) for at, one in enumerate(small)]
    lines = [line.path for line in machines_or_problems(cluster(), small) if not isinstance(line, SlurmMachine)]
    assert lines == ([] if fits else ["Slurm of node2", "Slurm of node3"])


@pytest.mark.parametrize(
    ("low", "high", "off"), [(12.0, 12.5, True), (-12.5, -12.0, True), (-20.0, 20.0, False), (0, 5, False)]
)
def test_a_clock_counts_as_off_only_where_it_must_be(small: list[Report], low: float, high: float, off: bool) -> None:
    small[1] = Report(small[1].node, small[1].facts, low, high)
    assert [line.path for line in machines_or_problems(cluster(), small) if not isinstance(line, SlurmMachine)] == [
        "clock of node2"
    ] * off


@pytest.mark.parametrize(
    ("groups", "slurm", "path"),
    [
        ({"train": GROUP, "other": GROUP}, {}, "cluster.groups.train.partition"),
        ({"train": {**GROUP, "role": "login"}}, {}, "cluster.nodes"),
    ],
)
def test_a_cluster_without_nodes_for_jobs_is_refused(small: list[Report], groups: Any, slurm: Any, path: str) -> None:
    assert path in [line.path for line in machines_or_problems(cluster(groups, slurm), small)]


@pytest.mark.parametrize(
    "settings", [{"NodeName": "x"}, {"statesavelocation": "/x"}, {"KillWait": "30\nInclude=/x"}, {"a b": "1"}]
)
def test_settings_that_the_plan_makes_are_not_for_setting(settings: dict[str, str]) -> None:
    with pytest.raises(UserError):
        cluster(slurm={"settings": settings})


def test_a_backend_with_a_slurm_takes_no_controller() -> None:
    with pytest.raises(UserError, match="allowed: ec2, machines"):
        cluster(backend="hyperpod-slurm")
