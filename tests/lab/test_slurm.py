"""A real Slurm on the nodes of a lab: jobs run, and one whose node is lost runs again on the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import Slurm
from tests.conftest import require
from tests.processes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm() -> Iterator[tuple[Lab, Slurm]]:
    """One controller and three workers, which the tests of this file share."""
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu") as lab:
        yield lab, Slurm(lab).start()


def state(slurm: Slurm, job: int) -> str:
    return slurm.job(job)["JobState"]


def test_job_runs_on_its_nodes_with_output_on_the_shared_folder(
    slurm: tuple[Lab, Slurm],
) -> None:
    lab, there = slurm
    job = there.submit("#!/bin/sh\nsrun hostname\n", "--nodes=3", "--ntasks-per-node=1", "--output=names.%j")
    wait_until(lambda: state(there, job) == "COMPLETED")
    outputs = {node.read(f"/fsx/names.{job}") for node in lab.nodes}
    assert [sorted(output.split()) for output in outputs] == [["node2", "node3", "node4"]]


def test_script_that_slurm_refuses_is_an_error_with_slurms_words(slurm: tuple[Lab, Slurm]) -> None:
    with pytest.raises(RuntimeError, match="invalid partition specified: nowhere"):
        slurm[1].submit("#!/bin/sh\ntrue\n", "--partition=nowhere")


def test_job_with_a_lost_node_runs_again_and_the_node_takes_work(
    slurm: tuple[Lab, Slurm],
) -> None:
    lab, there = slurm
    script = '#!/bin/sh\necho "$SLURM_JOB_NODELIST" >> nodes.$SLURM_JOB_ID\nsrun sleep 600\n'
    job = there.submit(script, "--requeue", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append")
    log = f"/fsx/nodes.{job}"
    wait_until(lambda: lab["node1"].exists(log))
    victim = lab[there.call("scontrol", "show", "hostnames", lab["node1"].read(log).strip()).stdout.split()[-1]]
    victim.crash()
    there.call("scontrol", "update", f"NodeName={victim.name}", "State=DOWN", "Reason=lost")
    there.wait({victim.name: "down"})
    wait_until(lambda: len(lab["node1"].read(log).splitlines()) >= 2)
    again = there.call("scontrol", "show", "hostnames", lab["node1"].read(log).splitlines()[-1]).stdout.split()
    assert victim.name not in again
    assert int(there.job(job)["Restarts"]) >= 1
    there.call("scancel", str(job))
    victim.boot()
    there.wait({node.name: "idle" for node in lab.nodes[1:]})
    assert victim.exec("systemctl", "is-active", "slurmd", "munge", "fsx.mount").stdout.split() == ["active"] * 3
