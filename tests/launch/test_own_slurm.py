"""`fab slurm-up` on machines that have no scheduler, and runs on the Slurm that it makes; nothing here is of the lab's recipe
but what installing Debian's packages would leave on a node."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lustrain.problem import DIFFERS, DONE, FAILED, UNREACHABLE, USAGE
from node_setup.agent.owned import SLURMD
from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import QUICK, Slurm, bring_packages
from tests.conftest import require
from tests.lab.training import ROOT, assert_equals_an_undisturbed_run
from tests.launch.test_launch_slurm import Place
from tests.node_setup.lab_fleet import Operator, Said
from tests.processes import wait_until

pytestmark = pytest.mark.slow
OURS = ("/etc/slurm", "/etc/munge", "/etc/systemd/system")
KEY = "/etc/munge/munge.key"


@dataclass(frozen=True)
class Machines:
    """Four machines with the packages and nothing configured; the first one shall be the controller."""

    lab: Lab
    operator: Operator

    def up(self, *flags: str) -> Said:
        return self.operator.fab("slurm-up", *flags)

    def made(self) -> Slurm:
        said = self.up()
        assert said.status == DONE, (said.report, said.errors)
        slurm = Slurm(self.lab)
        assert slurm.states() == {node.name: "idle" for node in self.lab.nodes[1:]}
        return slurm

    def refused(self, code: int) -> list[str]:
        """The lines of a refusal; AssertionError where it changed a running machine, or ends with another code."""
        running = [node for node in self.lab.nodes if node.running]
        before = [node.tree(*OURS) for node in running]
        process = self.operator.start("slurm-up")
        out, errors = process.communicate(timeout=600)
        assert process.returncode == code, out + errors
        assert [node.tree(*OURS) for node in running] == before
        assert "Traceback" not in errors
        return list(json.loads(out)["error"])

    def edit(self, **keys: Any) -> None:
        self.operator.write(json.loads(self.operator.cluster.read_text()) | keys)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    require(why_not() is None, str(why_not()))
    require(lab_slurm.why_not() is None, str(lab_slurm.why_not()))
    with Lab(4, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix]) as lab:
        for node in lab.nodes:
            bring_packages(node)
        slurm = {"controller": lab.nodes[0].address, "settings": dict(QUICK)}
        # What they share is a folder here, and no Lustre.
        yield Machines(lab, Operator(lab, tmp_path, slurm=slurm, lustre=None))


def key_of(node: Node) -> bytes:
    return bytes.fromhex(node.exec("od", "-An", "-v", "-tx1", KEY).stdout.replace("\n", "").replace(" ", ""))


def test_a_run_outlives_a_lost_node_which_comes_back_by_itself(machines: Machines) -> None:
    lab = machines.lab
    place = Place(lab, machines.made())
    place.write()
    (lab.shared / "cluster.json").write_text(machines.operator.cluster.read_text())
    job = int(place.fab("train", "config.toml", "--cluster", "cluster.json", "--nproc", "1", "--nodes", "2")["job"])
    place.committed()
    victim = lab[place.records()[0]["nodes"][1]]
    victim.crash()
    place.go()
    assert place.ended(job) == "COMPLETED", place.log()
    assert_equals_an_undisturbed_run(place.run)
    place.slurm.wait({victim.name: "down"})
    found = machines.refused(UNREACHABLE)
    assert any(victim.address in line for line in found)
    victim.boot()
    place.slurm.wait({node.name: "idle" for node in lab.nodes[1:]})
    assert machines.up("--check").status == DONE


def test_all_machines_get_one_key_that_nothing_shows(machines: Machines) -> None:
    assert machines.up("--check").status == DIFFERS
    assert not machines.lab.nodes[0].exists(KEY)
    said = machines.up()
    assert said.status == DONE, (said.report, said.errors)
    (key,) = {key_of(node) for node in machines.lab.nodes}
    modes = {node.exec("stat", "-c", "%a %U", KEY).stdout.strip() for node in machines.lab.nodes}
    assert (len(key), modes) == (1024, {"400 munge"})
    shown = json.dumps(said.report) + said.errors
    files = "\n".join(
        node.exec("sh", "-c", "cat /var/lib/lustrain/*.json /run/lustrain/* 2>/dev/null; true").stdout
        for node in machines.lab.nodes
    )
    for form in (base64.b64encode(key).decode(), key.hex()):
        assert form[:40] not in shown + files
    again = machines.up()
    assert all(
        again.rows(node.name, "ok") and not again.rows(node.name, "changed", "failed") for node in machines.lab.nodes
    )


def test_a_changed_list_of_machines_leaves_jobs_alone(machines: Machines) -> None:
    slurm = machines.made()
    job = slurm.submit("#!/bin/sh\nsleep 600\n", "--nodelist=node2")
    wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING")
    addresses = [node.address for node in machines.lab.nodes]
    machines.edit(nodes={"addresses": [addresses[0], *addresses[2:]]})
    assert any("node2" in line for line in machines.refused(USAGE)), "its job would be lost"
    machines.edit(nodes={"addresses": addresses[:3]})
    assert machines.up().status == DONE
    assert sorted(slurm.states()) == ["node2", "node3"]
    # The machine at node4's address is another one now, and knows nothing of the cluster.
    machines.lab["node4"].replace()
    bring_packages(machines.lab["node4"])
    machines.edit(nodes={"addresses": addresses})
    said = machines.up()
    assert said.status == DONE, said.report
    slurm.wait({"node2": "mixed", "node3": "idle", "node4": "idle"})
    assert slurm.job(job)["JobState"] == "RUNNING"
    assert key_of(machines.lab["node4"]) == key_of(machines.lab["node1"])


def test_what_is_out_of_order_is_told_and_put_right(machines: Machines) -> None:
    slurm, lab = machines.made(), machines.lab
    lab["node2"].write(KEY, "k" * 64, 0o400)
    lab["node3"].exec("systemctl", "stop", "slurmd.service")
    slurm.call("scontrol", "update", "NodeName=node4", "State=DRAIN", "Reason=a fan is loud")
    said = machines.up("--check")
    assert said.status == DIFFERS
    told = "\n".join(said.report["problems"])
    assert f"munge key of {lab['node2'].address}" in told
    assert f"slurmd.service of {lab['node3'].address}" in told
    assert "a fan is loud" in told
    assert "slurm.munge-key" in said.rows("node2", "change")
    assert machines.up().status == FAILED
    assert lab["node2"].read(f"{KEY}.before-lustrain") == "k" * 64
    slurm.wait({"node2": "idle", "node3": "idle", "node4": "drained"})
    slurm.call("scontrol", "update", "NodeName=node4", "State=RESUME")
    assert machines.up().status == DONE


def test_a_node_that_is_found_unfit_is_drained_with_the_reason(machines: Machines) -> None:
    slurm, lab = machines.made(), machines.lab
    health = "/etc/slurm/lustrain-health"
    lab["node2"].exec(health)
    assert slurm.states()["node2"] == "idle", "a node that was never tuned is left alone"
    assert machines.operator.fab("node-tune").status == DONE
    for name in ("node2", "node3"):
        lab[name].exec(health)
    assert slurm.states()["node2"] == "idle"
    # Without it slurmd has the machine's small limit, and so would jobs.
    lab["node3"].exec("rm", SLURMD)
    lab["node3"].exec("systemctl", "daemon-reload")
    lab["node3"].exec("systemctl", "restart", "slurmd.service")
    lab["node3"].exec(health)
    slurm.wait({"node2": "idle", "node3": "drained", "node4": "idle"})
    assert any("lustrain: slurmd-memlock" in line for line in machines.up("--check").report["problems"])


def test_a_controller_that_moves_leaves_one_slurmctld(machines: Machines) -> None:
    machines.made()
    lab = machines.lab
    machines.edit(slurm={"controller": lab["node2"].address, "controller_runs_jobs": True, "settings": dict(QUICK)})
    assert machines.up().status == DONE
    runs = {
        unit: [
            node.name for node in lab.nodes if node.exec("systemctl", "is-active", unit, check=False).returncode == 0
        ]
        for unit in ("slurmctld", "slurmd")
    }
    assert runs == {"slurmctld": ["node2"], "slurmd": ["node1", "node2", "node3", "node4"]}
    assert {key_of(node) for node in lab.nodes} == {key_of(lab["node2"])}


def test_a_slurm_that_is_not_ours_is_left_alone(machines: Machines) -> None:
    machines.lab["node3"].write("/etc/slurm/slurm.conf", "ClusterName=theirs\n")
    lines = machines.refused(USAGE)
    assert any(line.startswith("/etc/slurm/slurm.conf of") and "theirs" in line for line in lines)
