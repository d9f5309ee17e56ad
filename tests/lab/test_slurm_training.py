"""Training under a real Slurm, by the script of docs/train.md as it stands there: a lost node costs time, and nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import SHARED, Slurm
from tests.conftest import require
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run, attempts, config
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_DONE, EXIT_REQUEUE
from trainer.metrics.reader import read_events
from trainer.storage import open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm() -> Iterator[tuple[Lab, Slurm]]:
    """One controller and three workers."""
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix]) as lab:
        (lab.shared / "config.toml").write_text(config("run", hold=f"{SHARED}/go"))
        yield lab, Slurm(lab).start()


def script() -> str:
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(found)


def nodes_of(slurm: Slurm, job: int) -> list[str]:
    return slurm.call("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).stdout.split()


def submit(slurm: Slurm) -> int:
    variables = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", **VARIABLES}
    export = ",".join(f"{name}={value}" for name, value in variables.items())
    return slurm.submit(script(), f"--export={export}", "--output=log")


def wait_for_end(lab: Lab, slurm: Slurm, job: int) -> None:
    """Until the job has ended; AssertionError with its log where it has failed."""
    wait_until(lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED"), 500)
    assert slurm.job(job)["JobState"] == "COMPLETED", (lab.shared / "log").read_text()
    first, *others = attempts(lab.shared / "run")
    assert (first, set(others)) == ("started", {"resumed"})
    events = read_events(open_store(f"{lab.shared}/run"))
    assert events[0]["launch_attempt"] < events[-1]["launch_attempt"]


@pytest.mark.parametrize("lost", [0, 1], ids=["the batch host", "another node"])
def test_job_that_loses_a_node_goes_on_and_ends_as_if_it_had_not(slurm: tuple[Lab, Slurm], lost: int) -> None:
    lab, there = slurm
    job = submit(there)
    wait_until(lambda: committed(open_store(f"{lab.shared}/run")))
    victim = nodes_of(there, job)[lost]
    lab[victim].crash()
    (lab.shared / "go").touch()
    wait_for_end(lab, there, job)
    assert victim not in nodes_of(there, job)
    assert_equals_an_undisturbed_run(lab.shared / "run")


def test_a_job_that_gets_a_notice_saves_and_goes_on_by_itself(slurm: tuple[Lab, Slurm]) -> None:
    lab, there = slurm
    job = submit(there)
    store = open_store(f"{lab.shared}/run")
    wait_until(lambda: committed(store))
    there.call("scancel", "--signal=USR1", f"{job}.0")
    wait_until(lambda: any(event["event"] == "notice" for event in read_events(store)))
    (lab.shared / "go").touch()
    wait_for_end(lab, there, job)
    stopped = [event["exit_code"] for event in read_events(store) if event["event"] == "stopped"]
    assert (stopped[0], stopped[-1]) == (EXIT_REQUEUE, EXIT_DONE)
    assert_equals_an_undisturbed_run(lab.shared / "run")
