"""The scene of meshes: each trains as one rank does, goes on after kills to the bit, and goes on from every other."""

from __future__ import annotations

import signal
from itertools import permutations

import pytest

from tests.fork_server import ForkServer
from tests.trainer.meshes import MESHES, MeshRuns, equal
from trainer.metrics.reader import read_events
from trainer.storage import open_store

CLOSE = 1e-5
"""Sums in another order: 3e-8 in losses and 6e-6 in norms were seen."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def runs(request: pytest.FixtureRequest, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> MeshRuns:
    """On each mesh one uninterrupted run."""
    made = MeshRuns(fork_server, tmp_path_factory.mktemp("meshes"), tied=request.param)
    for mesh in MESHES:
        made.train(mesh, mesh)
    return made


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_rank(runs: MeshRuns, mesh: str) -> None:
    for mine, ones in zip(runs.steps(mesh), runs.steps("one"), strict=True):
        assert mine == pytest.approx(ones, rel=CLOSE)


@pytest.mark.parametrize("mesh", MESHES)
def test_run_that_is_killed_ends_with_the_same_bits(runs: MeshRuns, fork_server: ForkServer, mesh: str) -> None:
    killed = f"{mesh}-killed"
    job = fork_server.start(
        runs.words(killed, mesh, "train.steps=1000000", "checkpoint.every_steps=2"), MESHES[mesh][0]
    )
    job.wait_for("checkpoint committed")
    job.send(signal.SIGKILL)
    job.wait()
    assert 0 not in job.codes()
    steps = max(8, len(runs.steps(killed)))
    whole = f"{mesh}-{steps}"
    runs.train(whole, mesh, f"train.steps={steps + 2}")
    runs.train(killed, mesh, f"train.steps={steps + 2}")
    assert runs.steps(killed) == runs.steps(whole)
    assert equal(runs.tensors(killed), runs.tensors(whole))


@pytest.mark.parametrize(("saved", "resumed"), list(permutations(MESHES, 2)), ids=str)
def test_any_mesh_goes_on_from_any_other(runs: MeshRuns, saved: str, resumed: str) -> None:
    run = f"{saved}-to-{resumed}"
    runs.train(run, saved, "train.steps=4")

    runs.train(run, resumed)
    for mine, ones in zip(runs.steps(run), runs.steps("one"), strict=True):
        assert mine == pytest.approx(ones, rel=CLOSE)
    began = [event["event"] for event in read_events(open_store(f"{runs.folder}/{run}"))]
    assert began.count("resumed") == 1
