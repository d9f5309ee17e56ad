"""Training under a real Slurm, by the script of docs/train.md as it stands there: a lost node costs time, and nothing else."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import Slurm
from tests.conftest import require
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.launch.local import LocalJob
from trainer.metrics.reader import read_events, read_steps
from trainer.storage import open_store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 1500
CONFIG = f"""
[run]
uri = "run"
[task]
name = "tests.trainer.tiny_task:Tiny"
[train]
steps = {STEPS}
global_batch = 4
micro_batch = 2
[optimizer]
lr = 0.01
[checkpoint]
every_steps = 20
[parallel]
device = "cpu"
"""


@pytest.fixture
def slurm() -> Iterator[tuple[Lab, Slurm]]:
    """One controller and three workers."""
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix]) as lab:
        (lab.shared / "config.toml").write_text(CONFIG)
        yield lab, Slurm(lab).start()


def script() -> str:
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(found)


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_steps(open_store(str(run)))}


def nodes_of(slurm: Slurm, job: int) -> list[str]:
    return slurm.call("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).stdout.split()


@pytest.mark.parametrize("lost", [0, 1], ids=["the batch host", "another node"])
def test_a_job_that_loses_a_node_goes_on_by_itself_and_ends_as_if_nothing_had_been(
    slurm: tuple[Lab, Slurm], tmp_path: Path, lost: int
) -> None:
    lab, there = slurm
    variables = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    export = ",".join(f"{name}={value}" for name, value in variables.items())
    job = there.submit(script(), f"--export={export}", "--output=log")
    store = open_store(f"{lab.shared}/run")
    wait_until(lambda: committed(store))
    victim = nodes_of(there, job)[lost]
    lab[victim].crash()
    wait_until(lambda: there.job(job)["JobState"] in ("COMPLETED", "FAILED"), 180)
    log = (lab.shared / "log").read_text()
    assert there.job(job)["JobState"] == "COMPLETED", log
    assert victim not in nodes_of(there, job)
    events = read_events(store)
    assert [event["event"] for event in events if event["event"] in ("started", "resumed")] == ["started", "resumed"]
    assert events[0]["launch_attempt"] < events[-1]["launch_attempt"]

    reference = CONFIG.replace('"run"', f'"{tmp_path}/run"')
    (tmp_path / "config.toml").write_text(reference)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert LocalJob(["train", f"{tmp_path}/config.toml"], 2, environment).wait() == 0
    assert losses(lab.shared / "run") == losses(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == STEPS
