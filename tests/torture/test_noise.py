"""In a world where everything breaks now and then, a run on Slurm ends by itself, with the losses of a quiet one."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_setup.slurm.conf import SCHEDULER_PARAMETERS
from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import QUICK, Slurm
from tests.conftest import require
from tests.lab.faulty_proxy import FaultyProxy
from tests.lab.servers import S3Place
from tests.lab.training import ROOT, losses
from tests.seeds import VARIABLE, chance
from tests.torture.noise import complaints, draw
from tests.torture.noisy_world import PATIENCE_S, World, kinds, noisy_config
from trainer.checkpoint.lineage.audit import audit
from trainer.checkpoint.lineage.history import read_history
from trainer.checkpoint.lineage.lease import committed
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.config import CheckpointConfig
from trainer.metrics.reader import read_steps
from trainer.node.launcher import LocalJob

pytestmark = pytest.mark.slow
WORKERS = 3
TIMING = {
    **QUICK,
    # Nothing but a fault makes a node silent for so long.
    "SlurmdTimeout": "20",
    "SchedulerParameters": f"{QUICK['SchedulerParameters']},{SCHEDULER_PARAMETERS}",
}
TORTURE_S = float(os.environ.get("LUSTRAIN_NOISE_S", "1800"))
Say = Callable[[str], None]


@contextmanager
def world(place: S3Place, name: str, folder: Path) -> Iterator[World]:
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    folder.mkdir(parents=True)
    with (
        Lab(1 + WORKERS, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix], metadata=True) as lab,
        # The fast data path reaches port 80 alone.
        FaultyProxy(place.endpoint, host=lab.subnet.host_address, port=80) as proxy,
    ):
        yield World(lab, Slurm(lab, TIMING).start(), proxy, place.uri(name), folder)


def endure(place: S3Place, folder: Path, say: Say, *, name: str, steps: int, nodes: str, count: int) -> None:
    """Let `count` faults happen to a run, and check everything that must hold of its history."""
    faults = draw(chance(f"noise {name}"), count)
    with world(place, name, folder) as noisy:
        (folder / "seed").write_text(f"{VARIABLE}={os.environ[VARIABLE]}\n")
        noisy.write_config(steps)
        noisy.job = noisy.train("--nodes", nodes, "--spare", "1", "--set", "interrupt.metadata=true")
        try:
            noisy.strike_all(faults)
            assert noisy.wait_for_end() == "COMPLETED", noisy.log()[-2000:]
            records = noisy.records()
            assert complaints(records, noisy.struck, steps) == []
            noisy.slurm.wait({node.name: "idle" for node in noisy.slurm.workers}, PATIENCE_S)
        finally:
            noisy.keep()
    say(f"  {name}: {len(records)} launches; {kinds(noisy.struck)}")
    store = noisy.store
    assert [one for one in committed(store) if not verify_checkpoint(store, one).ok] == []
    assert audit(store, read_history(store), CheckpointConfig) == []
    mine = {record["step"]: record["loss"] for record in read_steps(store)}
    expected = quiet(steps)
    if {len(record["nodes"]) for record in records} == {2}:
        assert mine == expected
    else:
        assert mine == pytest.approx(expected, rel=1e-4)


def quiet(steps: int) -> dict[int, float]:
    """Losses of two ranks of this machine to which nothing happens."""
    with tempfile.TemporaryDirectory(prefix="lustrain-reference-") as folder:
        file = Path(folder, "config.toml")
        file.write_text(noisy_config(f"{folder}/reference", steps, 0.0, ""))
        assert LocalJob(["train", str(file)], 2, {**os.environ, "OMP_NUM_THREADS": "1"}).wait() == 0
        return losses(Path(folder, "reference"))


@pytest.mark.timeout(2400)
def test_run_ends_by_itself_as_a_quiet_one(weed_s3: S3Place, tmp_path: Path, say: Say) -> None:
    endure(weed_s3, tmp_path / "world", say, name="run", steps=2000, nodes="2", count=12)


@pytest.mark.torture
@pytest.mark.timeout(3 * 3600)
def test_runs_of_half_an_hour_end_as_quiet_ones(weed_s3: S3Place, tmp_path: Path, say: Say) -> None:
    end, number = time.monotonic() + TORTURE_S, 0
    while time.monotonic() < end:
        number += 1
        nodes = "1-2" if number % 3 == 0 else "2"
        folder = tmp_path / f"world-{number}"
        endure(weed_s3, folder, say, name=f"run-{number}", steps=6000, nodes=nodes, count=24)
