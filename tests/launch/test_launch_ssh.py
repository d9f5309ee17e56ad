"""`fab train --on ssh` on nodes of a lab: launches are units there, which go on whatever is lost of nodes or of `fab train`."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.backends.ssh_unit import unit_name
from lustrain.cluster import Access, Capacity, Cluster, NodeGroup, Nodes
from lustrain.problem import UNREACHABLE, USAGE
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import SHARED
from tests.conftest import require
from tests.fork_server import PATIENT
from tests.lab.training import ROOT, VARIABLES, assert_equals_an_undisturbed_run, config
from tests.launch import planted_engine
from tests.processes import wait_until
from trainer.checkpoint.lineage.lease import committed
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_PEERS, EXIT_REQUEUE
from trainer.run import journal
from trainer.storage import open_store

pytestmark = pytest.mark.slow
KEY = "/root/lab_key"
MOUNT = f"""[Mount]
What=/run/simulated/fsx
Where={SHARED}
Options=bind
[Install]
WantedBy=multi-user.target
"""


class Place:
    """Two nodes to train on, and `fab` on the first of them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.operator, self.other = lab.nodes
        self.run = lab.shared / "run"
        for node in lab.nodes:
            node.write("/etc/systemd/system/fsx.mount", MOUNT)
            node.exec("systemctl", "enable", "--now", "fsx.mount")
        self.operator.write(KEY, Path(lab.key).read_text(), 0o600)
        self.describe("cluster.json", *(node.address for node in lab.nodes))

    def describe(self, file: str, *addresses: str) -> None:
        """Write the Cluster of these machines."""
        cluster = Cluster(
            name="lab",
            backend="machines",
            nodes=Nodes(addresses=addresses),
            reach=Access(via="ssh", user="root", key=KEY),
            groups={"train": NodeGroup(type="machine", count=len(addresses))},
            runs_uri=f"{SHARED}/runs/",
            capacity=Capacity(mode="owned"),
        )
        (self.lab.shared / file).write_text(cluster.model_dump_json())

    def command(self, *words: str, cluster: str = "cluster.json") -> list[str]:
        variables = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "HOME": "/root", **VARIABLES}
        # Here a silent node is to be missed soon.
        given = " ".join(f"{name}={value}" for name, value in variables.items() if name not in PATIENT)
        line = f"cd {SHARED} && exec env -i {given} fab -r {ROOT} {shlex.join(words)} --cluster {cluster}"
        return ["sh", "-c", line]

    def fab(self, *words: str, code: int = 0, cluster: str = "cluster.json") -> Any:
        """What fab prints as JSON, called in the shared folder."""
        done = self.operator.exec(*self.command(*words, "--json", cluster=cluster), check=False)
        assert done.returncode == code, (done.stdout, done.stderr)
        return json.loads(done.stdout)

    def train(self, *words: str) -> subprocess.Popen[bytes]:
        """Start fab train, which supervises until the run has ended."""
        (self.lab.shared / "config.toml").write_text(config("run", hold=f"{SHARED}/go"))
        return self.operator.start(*self.command("train", "config.toml", "--on", "ssh", "--nodes", "2", *words))

    def supervisor(self) -> int:
        """The process of fab train, by its number on the node."""
        return int(json.loads((self.run / journal.REQUEST).read_text())["pid"])

    def records(self) -> list[dict[str, Any]]:
        return journal.read(open_store(str(self.run))) if self.run.exists() else []

    def committed(self) -> None:
        wait_until(lambda: self.run.exists() and committed(open_store(str(self.run))))

    def go(self) -> None:
        (self.lab.shared / "go").touch()

    def told(self) -> tuple[Any, str]:
        """For an assertion that fails."""
        return self.records(), self.lab.output()


@pytest.fixture
def place() -> Iterator[Place]:
    require(why_not() is None, str(why_not()))
    with Lab(2, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix]) as lab:
        yield Place(lab)


def test_run_waits_for_a_lost_node_and_ends_as_if_undisturbed(place: Place) -> None:
    job = place.train()
    place.committed()
    place.other.crash()
    place.go()
    wait_until(lambda: "ended" in place.records()[0])
    place.other.boot()
    assert job.wait(480) == EXIT_DONE, place.told()
    first, last = place.records()[0], place.records()[-1]
    assert (first["code"], first["blamed"], last["code"]) == (EXIT_PEERS, [place.other.address], EXIT_DONE)
    assert_equals_an_undisturbed_run(place.run)
    assert place.fab("status", "/fsx/run")["state"] == "done"
    lines = place.fab("logs", "/fsx/run", "--rank", "0", "--launch", "1")["lines"]
    assert any(line["text"].startswith("checkpoint committed: step 20,") for line in lines)
    assert {line["source"] for line in lines} == {place.operator.address}
    left = place.operator.exec("sh", "-c", "ls /run/systemd/transient /run/lustrain").stdout.split()
    assert left == ["/run/lustrain:", "/run/systemd/transient:"]


def test_run_in_containers_ends_as_one_on_the_nodes(place: Place) -> None:
    for node in place.lab.nodes:
        planted_engine.plant(node)
    # It is mounted, so it has to be there.
    place.go()
    assert place.train("--image", planted_engine.IMAGE).wait(480) == EXIT_DONE, place.told()
    assert_equals_an_undisturbed_run(place.run)
    unit = unit_name("/fsx/run", 1)
    for node in place.lab.nodes:
        words = [call.split() for call in planted_engine.calls(node)]
        assert any(f"--name={unit}" in call for call in words)
        assert ["rm", "--force", unit] in words


def test_image_that_no_node_fetches_is_one_line_a_node(place: Place) -> None:
    for node in place.lab.nodes:
        planted_engine.plant(node)
    place.go()
    (place.lab.shared / "config.toml").write_text(config("run", hold=f"{SHARED}/go"))
    train = ["train", "config.toml", "--on", "ssh", "--nodes", "2"]
    *lines, last = place.fab(*train, "--image", planted_engine.DENIED, code=USAGE)["error"]
    assert ["Error response from daemon: pull access denied; fix: " in line for line in lines] == [True, True]
    assert last.startswith("--nodes = 2: 0 of 2 nodes are ready")
    assert not place.run.exists()


def test_launch_outlives_its_supervisor_and_is_taken_over(place: Place) -> None:
    job = place.train()
    place.committed()
    place.operator.exec("kill", "-KILL", str(place.supervisor()))
    job.wait()
    unit = unit_name("/fsx/run", 1)
    assert place.other.exec("systemctl", "is-active", unit).stdout.strip() == "active"
    (line,) = place.fab("train", "config.toml", "--on", "ssh", "--nodes", "2", code=USAGE)["error"]
    assert line.startswith(f"run.uri = '/fsx/run': unit {unit} of it still runs on ")
    again = place.train("--resume")
    place.go()
    assert again.wait(480) == EXIT_DONE, place.told()
    assert [record["code"] for record in place.records()] == [EXIT_DONE]
    assert_equals_an_undisturbed_run(place.run)


DETACHED = ["train", "config.toml", "--on", "ssh", "--nodes", "2", "--detach"]


def test_detached_run_outlives_its_node_by_resume(place: Place) -> None:
    (place.lab.shared / "config.toml").write_text(config("run", hold=f"{SHARED}/go"))
    # Its first node is not the one on which fab is called.
    place.describe("cluster.json", place.other.address, place.operator.address)
    refused = place.fab(*DETACHED, code=USAGE)["error"]
    assert refused[-1].startswith(f"--detach = '{place.other.address}': does not reach enough nodes")
    assert not place.run.exists()
    place.other.write("/root/.ssh/id_ed25519", Path(place.lab.key).read_text(), 0o600)
    assert place.fab(*DETACHED)["supervisor"]["node"] == place.other.address
    place.committed()
    (line,) = place.fab(*DETACHED, "--resume", code=USAGE)["error"]
    assert line.startswith("--resume = '/fsx/run': unit lustrain-supervisor-run-")
    assert place.fab("status", "/fsx/run")["submitted"]["ssh"]["supervisor"] == place.other.address
    place.other.crash()
    place.other.boot()
    place.other.write("/root/.ssh/id_ed25519", Path(place.lab.key).read_text(), 0o600)
    place.fab(*DETACHED, "--resume")
    place.go()
    wait_until(lambda: place.records()[-1].get("code") == EXIT_DONE, 480)
    assert place.records()[0]["code"] == EXIT_PEERS, place.told()
    assert_equals_an_undisturbed_run(place.run)
    wait_until(lambda: "all steps are done" in place.fab("logs", "/fsx/run")["lines"][-1]["text"])
    lines = place.fab("logs", "/fsx/run")["lines"]
    assert any(line["text"].startswith("lustrain: launch 1 on ") for line in lines)
    assert place.other.exec("sh", "-c", "ls /run/systemd/transient /run/lustrain").stdout.split() == [
        "/run/lustrain:",
        "/run/systemd/transient:",
    ]


def test_detached_run_stops_and_leaves_no_unit(place: Place) -> None:
    (place.lab.shared / "config.toml").write_text(config("run", hold=f"{SHARED}/go"))
    place.fab(*DETACHED, "--set", "train.steps=1000000")
    place.committed()
    place.fab("stop", "/fsx/run")
    place.go()
    wait_until(lambda: place.fab("status", "/fsx/run")["state"] == "stopped")
    for node in place.lab.nodes:
        wait_until(lambda node=node: not node.exec("ls", "/run/systemd/transient").stdout.split())


def test_stop_commits_and_stop_now_leaves_no_unit(place: Place) -> None:
    endless = ["--set", "train.steps=1000000"]
    job = place.train(*endless)
    place.committed()
    place.operator.exec("kill", f"-{signal.Signals.SIGINT.value}", str(place.supervisor()))
    place.go()
    assert job.wait(300) == EXIT_REQUEUE, place.told()
    assert place.records()[-1]["gained"]
    again = place.train("--resume", *endless)
    wait_until(lambda: len(committed(open_store(str(place.run)))) > 1 and len(place.records()) == 2)
    wait_until(lambda: committed(open_store(str(place.run)))[-1].generation == 2)
    cancelled = place.fab("stop", "/fsx/run", "--now")["cancelled"]
    assert len(cancelled) == 2
    assert again.wait(300) != EXIT_DONE
    assert len(place.records()) == 2


def test_bad_input_is_one_line_a_node_and_leaves_nothing(place: Place) -> None:
    train = ["train", "config.toml", "--on", "ssh"]
    (place.lab.shared / "config.toml").write_text(config("run"))
    place.describe("gone.json", place.operator.address, place.lab.subnet.address(200))
    first, last = place.fab(*train, "--nodes", "2", code=UNREACHABLE, cluster="gone.json")["error"]
    assert first.startswith(f"{place.lab.subnet.address(200)}: unreachable: ")
    assert last.startswith("--nodes = 2: 1 of 2 nodes are ready")
    lines = place.fab(*train, "--nodes", "2", "--python", "/nothing", code=USAGE)["error"]
    assert [": /nothing cannot load the trainer: " in line for line in lines] == [True, True, False]
    place.other.exec("rmdir", "/run/systemd/system")
    first, last = place.fab(*train, "--nodes", "2", code=USAGE)["error"]
    assert first.startswith(f"{place.other.address}: it does not run systemd")
    assert not place.run.exists()
    assert place.fab(*train, "--nodes", "1", "--set", "task.nothing=1", code=EXIT_CONFIG)["exit_code"] == EXIT_CONFIG
    (record,) = place.records()
    assert "task.nothing" in record["said"]
