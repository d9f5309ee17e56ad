"""The all-reduce of node-verify over a real sshd; the launcher is a program that prints recorded outputs of real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lustrain.cluster import parse
from node_setup import answers
from node_setup.allreduce import launch, programs
from node_setup.allreduce.launch import Reduction, all_reduce, as_json, lines
from node_setup.allreduce.programs import UNNAMED, Programs, libraries
from node_setup.fleet.inventory import Inventory
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.options import Options
from node_setup.fleet.pool import ANSWERED, Concurrency, Outcome
from node_setup.fleet.protocol import Agent
from node_setup.fleet.run import FleetRun
from node_setup.fleet.transport import Connections, Deadline
from node_setup.request import Tuning
from tests.node_setup.local_sshd import PATIENT, Sshd
from tests.node_setup.meanwhile import Sleeper
from tests.processes import wait_until

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "recorded" / "nccl"
LAUNCHER = """#!/bin/sh
echo "$LD_LIBRARY_PATH $0 $*" >>{log}
tr '\\0' ' ' </proc/$PPID/cmdline >{log}.under
{before}
cat {output} && exit {status}
"""
"""Stands for srun, mpirun and the test: it keeps its arguments and its parent's, and prints a file. It runs nothing."""


@pytest.fixture
def launcher(machine: Sshd, tmp_path: Path) -> Callable[..., Path]:
    def install(output: Path, status: int = 0, before: str = "") -> Path:
        for name in ("srun", "mpirun", "all_reduce_perf"):
            program = machine.folder / "bin" / name
            program.write_text(LAUNCHER.format(log=tmp_path / "log", output=output, status=status, before=before))
            program.chmod(0o755)
        return tmp_path / "log"

    return install


def described(backend: str) -> Any:
    groups = {"controller": {"type": "c5.2xlarge", "count": 1, "role": "controller"}}
    groups["train"] = {"type": "p5.48xlarge", "count": 2, "gpus": 8, "efa": 32}
    where = {"hyperpod_cluster": "pod"} if backend.startswith("hyperpod") else {"addresses": ["n1"]}
    fixed = {"name": "c", "runs_uri": "/runs", "capacity": {"mode": "owned"}, "reach": {"via": "ssh"}}
    return parse({"backend": backend, "nodes": where, "groups": groups, **fixed})


def verified(machine: Sshd, name: str, group: str, *, ready: bool = True, jobs: Any = ()) -> Outcome:
    node = replace(machine.node, name=name, group=group)
    return Outcome(
        node, ANSWERED, status=0, answer=answers.parse({"version": 1, "host": name, "ready": ready, "jobs": jobs})
    )


def reduced(made: FleetRun, outcomes: list[Outcome], named: Programs = UNNAMED, left: float = 300) -> list[Reduction]:
    return all_reduce(made, outcomes, Deadline(left, lambda: 0.0), named)


def two(machine: Sshd, **second: Any) -> list[Outcome]:
    nodes = [verified(machine, "n1", "train"), verified(machine, "n2", "train", **second)]
    addresses = ("127.0.0.1", "127.0.0.2")
    return [
        replace(one, node=replace(one.node, address=address)) for one, address in zip(nodes, addresses, strict=True)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], FleetRun]]:
    connections = Connections(KnownHosts(str(tmp_path / "known")), PATIENT)

    def made(backend: str) -> FleetRun:
        found = Inventory((), described(backend) if backend else None)
        return FleetRun(Options(timeout_s=280), found, Tuning(), connections, Concurrency(), Agent(b"", ""))

    yield made
    connections.stop()


def test_slurm_is_asked_on_its_controller_by_host_names(machine: Sshd, launcher: Any, run: Any, tmp_path: Path) -> None:
    log = launcher(RECORDED / "p5-2-nodes-srun.txt")
    outcomes = [
        verified(machine, "head", "controller"),
        *(verified(machine, name, "train") for name in ("ip-1", "ip-2")),
    ]
    (found,) = reduced(run("hyperpod-slurm"), outcomes)
    assert found.measured is not None
    assert found.measured.all_nodes.busbw is not None
    said = log.read_text()
    assert said.startswith(f" {machine.folder}/bin/srun --nodes=2 --nodelist=ip-1,ip-2 --exclusive")
    assert any(line.startswith("all-reduce of train: ") for line in lines([found]))
    assert as_json([found])[0]["together"]["busbw"] == found.measured.all_nodes.busbw


def test_without_slurm_the_first_node_calls_the_others(machine: Sshd, launcher: Any, run: Any) -> None:
    log = launcher(RECORDED / "p5-2-nodes-srun.txt", status=1)
    (found,) = reduced(run("machines"), two(machine))
    assert f"{machine.folder}/bin/mpirun --host 127.0.0.1:8,127.0.0.2:8 -np 16" in log.read_text()
    assert found.measured is not None
    assert (found.measured.all_nodes.status, found.good) == ("failed", False)
    assert "status 1" in found.why[0]


def test_nodes_that_are_not_ready_are_left_out(machine: Sshd, launcher: Any, run: Any) -> None:
    nodes = [verified(machine, "n1", "train"), verified(machine, "n2", "train", ready=False)]
    (found,) = reduced(run("machines"), nodes)
    assert (found.measured, found.good, found.why) == (None, True, ("not run: 1 of its nodes are ready, it takes two",))


def test_without_a_cluster_nobody_knows_how_many_gpus_there_are(run: Any) -> None:
    (found,) = reduced(run(""), [])
    assert "give --cluster or --stack" in found.why[0]


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        ([{"kind": "gpu", "id": "71"}], "a job runs: gpu 71"),
        ([{"kind": "gpu", "id": str(pid)} for pid in range(8)], "a job runs: gpu 0, gpu 1, gpu 2 and 5 more"),
        (None, "it is not known whether a job runs"),
    ],
)
def test_a_node_with_a_job_or_nobody_knows_is_not_disturbed(
    machine: Sshd, launcher: Any, run: Any, jobs: Any, why: str
) -> None:
    log = launcher(RECORDED / "p5-2-nodes-srun.txt")
    (found,) = reduced(run("machines"), two(machine, jobs=jobs))
    assert (found.measured, found.left_out, log.exists()) == (None, {"n2": why}, False)
    assert lines([found]) == [
        f"all-reduce of train: n2 is left out: {why}",
        "all-reduce of train: not run: 1 of its nodes are ready and idle, it takes two",
    ]


@pytest.mark.parametrize("missing", ["mpirun", "all_reduce_perf"])
def test_missing_programs_launch_nothing_and_do_not_pass(
    machine: Sshd, launcher: Any, run: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    log = launcher(RECORDED / "p5-2-nodes-srun.txt")
    (machine.folder / "bin" / missing).unlink()
    monkeypatch.setattr(programs, "PLACES", dict.fromkeys(programs.PLACES, ("/nowhere/*",)))
    (found,) = reduced(run("machines"), two(machine))
    assert (found.measured, found.good, log.exists()) == (None, False, False)
    assert found.why[0].startswith(f"not run: no {missing} on n1, in PATH or /nowhere/*; fix: install it")


def test_named_nccl_test_precedes_the_newest_known_one(
    machine: Sshd, launcher: Any, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = launcher(RECORDED / "p5-2-nodes-srun.txt")
    real = (machine.folder / "bin" / "all_reduce_perf").rename(tmp_path / "named test")
    for version in ("12.9", "12.10"):
        folder = tmp_path / f"cuda-{version}" / "efa" / f"test-cuda-{version}"
        folder.mkdir(parents=True)
        (folder / "all_reduce_perf").symlink_to(real)
    place = f"{tmp_path}/cuda-*/efa/test-cuda-*/all_reduce_perf"
    monkeypatch.setattr(programs, "PLACES", {**programs.PLACES, "all_reduce_perf": (place,)})
    assert reduced(run("machines"), two(machine))[0].measured is not None
    newest = f"{tmp_path}/cuda-12.10/efa/test-cuda-12.10/all_reduce_perf"
    said = log.read_text()
    assert f" {newest} -b 8 " in said
    assert said.startswith(f"{tmp_path}/cuda-12.10/lib:{tmp_path}/cuda-12.10/lib64:/opt/amazon/ofi-nccl/lib")
    assert reduced(run("machines"), two(machine), Programs(str(real)))[0].measured is not None
    assert f" {real} -b 8 " in log.read_text().removeprefix(said)
    (found,) = reduced(run("machines"), two(machine), Programs(f"{tmp_path}/other"))
    assert found.why == (f"not run: {tmp_path}/other is not a program on n1; fix: name another path",)


def test_only_a_test_beside_its_cuda_gets_a_search_path() -> None:
    assert libraries("/usr/local/cuda/efa/test-cuda-12.8/all_reduce_perf").startswith("/usr/local/cuda/lib:")
    assert libraries("/opt/nccl-tests/build/all_reduce_perf") == ""


@pytest.mark.parametrize(("left", "limit"), [(150, 142), (3000, 280)])
def test_all_reduce_gets_only_the_remaining_time(
    machine: Sshd, launcher: Any, run: Any, left: float, limit: int
) -> None:
    log = launcher(RECORDED / "p5-2-nodes-srun.txt")
    (found,) = reduced(run("machines"), two(machine), left=25)
    assert (found.why, found.good, log.exists()) == (("not run: the 3600 s for all nodes are over",), False, False)
    reduced(run("machines"), two(machine), left=left)
    assert Path(f"{log}.under").read_text().startswith(f"timeout -k 5 {limit} {machine.folder}/bin/mpirun ")


def test_ctrl_c_ends_it_at_once_and_what_was_found_is_said(
    machine: Sshd, launcher: Any, run: Any, monkeypatch: pytest.MonkeyPatch, sleeper: Sleeper
) -> None:
    launcher(RECORDED / "p5-2-nodes-srun.txt", before=sleeper.command)

    class Interrupted(ThreadPoolExecutor):
        def map(self, *calls: Any, **options: Any) -> Any:
            super().map(*calls, **options)
            wait_until(sleeper.begun)
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "ThreadPoolExecutor", Interrupted)
    (found,) = reduced(run("machines"), [*two(machine), replace_name(two(machine)[0], "n3", "127.0.0.3")])
    assert found.measured is not None
    assert (found.measured.ended, found.good) == ("stopped by Ctrl-C", False)
    assert "stopped by Ctrl-C" in found.why


def replace_name(outcome: Outcome, name: str, address: str) -> Outcome:
    return replace(outcome, node=replace(outcome.node, name=name, address=address))
