"""Training under a real Slurm, by the script of docs/train.md as it stands there: a lost node costs time, and nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import Slurm
from tests.conftest import require
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run, attempts, config
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.metrics.reader import read_events
from trainer.storage import open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm() -> Iterator[tuple[Lab, Slurm]]:
    """One controller and three workers."""
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix]) as lab:
        (lab.shared / "config.toml").write_text(config("run"))
        yield lab, Slurm(lab).start()


def script() -> str:
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(found)


def nodes_of(slurm: Slurm, job: int) -> list[str]:
    return slurm.call("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).stdout.split()


@pytest.mark.parametrize("lost", [0, 1], ids=["the batch host", "another node"])
def test_a_job_that_loses_a_node_goes_on_by_itself_and_ends_as_if_nothing_had_been(
    slurm: tuple[Lab, Slurm], tmp_path: Path, lost: int
) -> None:
    lab, there = slurm
    variables = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", **VARIABLES}
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
    assert attempts(lab.shared / "run") == ["started", "resumed"]
    events = read_events(store)
    assert events[0]["launch_attempt"] < events[-1]["launch_attempt"]
    assert_equals_an_undisturbed_run(lab.shared / "run", tmp_path)
