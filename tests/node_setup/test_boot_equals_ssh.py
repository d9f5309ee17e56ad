"""A node that boots from the lifecycle bundle, without manual steps, ends as one that `fab node-tune` tuned.

The bundle's own scripts run on nodes of a lab. What the service or the image does before them is a unit here, with a name
that ours wait for: it mounts Lustre. Unproven: what HyperPod and cloud-init do around the scripts.
"""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from infra.plan.nodes.bundle import AGENT, DOCUMENT, FOLDER, ON_CREATE, ON_INIT, gathered
from lustrain.cluster import Tuning, node_document, to_json
from node_setup.agent import owned
from node_setup.agent.settings import catalog
from node_setup.pack import archive
from rehearsal.lab.cluster import GROUP, cluster_of
from rehearsal.lab.hardware import KINDS
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab
from tests.conftest import require
from tests.lab.faults import use_python
from tests.lab.nodes import StartLab
from tests.node_setup.agents import VERSIONS, interpreter
from tests.node_setup.lab_fleet import Operator
from tests.node_setup.lab_state import Files, files, simulated, sysctls

pytestmark = pytest.mark.slow

BUNDLE = "/opt/lustrain/bundle"
LOG = "/var/log/provision/provisioning.log"
SOURCED = f'source "$0/node.sh" && boot "$0/{AGENT}" '
"""As the first boot of EC2 does it."""
ENTRIES = {
    "hyperpod-slurm": ("bash", f"{BUNDLE}/{ON_INIT}"),
    "hyperpod-eks": ("bash", f"{BUNDLE}/{ON_CREATE}"),
    "ec2": ("bash", "-c", f"{SOURCED} ec2", BUNDLE),
    "machines": ("bash", "-c", f"{SOURCED} machines", BUNDLE),
}
WITHOUT_WAITING = ("env", "LUSTRAIN_WAIT_SECONDS=0", "LUSTRAIN_FLUSH_SECONDS=0")
OWN = ("/etc/hostname", "/etc/hosts", "/etc/mtab", "/etc/ssh/lab_host_key", "/etc/ssh/lab_host_key.pub", owned.REPORT)
"""What no two nodes have alike; the report of an apply says when it was, and whether it brought the agent along."""
MOUNTED_BEFORE = """[Unit]
Description=Stands for what mounts Lustre before the node is ours: the service, or the first boot
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/mkdir -p /fsx
ExecStart=mount -t lustre -o noatime,flock {dns_name}@tcp:/{mount_name} /fsx
[Install]
WantedBy=multi-user.target
"""
KEYS = sorted(one.key for one in catalog.load() if one.kind == "sysctl")


class Fleet:
    """A lab whose nodes belong to a cluster of the backend, each as its image and the service leave it; the operator's view."""

    def __init__(self, lab: Lab, folder: Path, backend: str) -> None:
        self.nodes = lab.nodes
        self.backend = backend
        self.operator = Operator(lab, folder)
        self.cluster = cluster_of(lab).model_copy(update={"backend": backend})
        self.file = folder / "cluster.json"
        self.switch({})
        for node in self.nodes:
            self.furnish(node)

    def furnish(self, node: Node) -> None:
        """What lies on a node before anything of ours runs: who it is, the bundle, and its file system mounted."""
        kind = KINDS[node.kind].type
        if self.backend.startswith("hyperpod"):
            members = [{"InstanceId": f"i-{one.name}", "CustomerIpAddress": one.address} for one in self.nodes]
            groups = [{"Name": GROUP, "InstanceType": f"ml.{kind}", "Instances": members}]
            node.write("/opt/ml/config/resource_config.json", json.dumps({"InstanceGroups": groups}))
        else:
            node.write("/etc/lustrain/node.json", json.dumps({"group": GROUP, "instance_type": kind}))
        document = json.dumps(node_document(self.cluster), sort_keys=True, indent=1) + "\n"
        generated = {AGENT: archive(), DOCUMENT: document.encode()}
        for file in gathered(FOLDER, generated=generated).files:
            target = Path(f"/proc/{node.pid}/root{BUNDLE}/{file.path}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
        if self.backend in ("ec2", "hyperpod-slurm") and self.cluster.lustre:
            unit = MOUNTED_BEFORE.format(**self.cluster.lustre.model_dump(include={"dns_name", "mount_name"}))
            node.write("/etc/systemd/system/lustrain-boot.service", unit)
            node.exec("systemctl", "enable", "--now", "lustrain-boot.service")

    def boot(self, node: Node) -> subprocess.CompletedProcess[str]:
        return node.exec(*WITHOUT_WAITING, *ENTRIES[self.backend], check=False, timeout=300)

    def switch(self, settings: dict[str, str]) -> None:
        """The cluster's tuning from now on; nodes hear of it when they are tuned or furnished."""
        self.cluster = self.cluster.model_copy(update={"tuning": Tuning(settings=settings)})
        self.file.write_text(json.dumps(to_json(self.cluster)))

    def tune(self, node: Node, *flags: str) -> int:
        return self.operator.fab("node-tune", "--node", node.address, *flags).status


def same(one: Node, other: Node) -> None:
    """Fails with what differs between two nodes; a folder that a file of ours had been in may stay behind empty."""
    assert (
        differing(*(_without_empty_folders(files(node, "/etc", "/var/lib/lustrain")) for node in (one, other))) == set()
    )
    assert sysctls(one, *KEYS) == sysctls(other, *KEYS)
    assert simulated(one) == simulated(other)


def differing(some: Files, others: Files) -> set[str]:
    paths = {path for path in {*some, *others} - set(OWN) if not _of_containers(path)}
    return {path for path in paths if some.get(path) != others.get(path)}


def _of_containers(path: str) -> bool:
    """What on_create.sh makes besides tuning: nobody moves the pods of a node that is up."""
    return path.endswith(("lustrain-container-data.service", "containerd.service.requires", "kubelet.service.requires"))


def _without_empty_folders(tree: Files) -> Files:
    held = {path for path, entry in tree.items() if not stat.S_ISDIR(entry[0])}
    full = {str(folder) for path in held for folder in PurePosixPath(path).parents}
    return {path: entry for path, entry in tree.items() if path in full or path in held}


@pytest.mark.parametrize(
    ("backend", "kind"), [("machines", "p5"), ("hyperpod-slurm", "p5"), ("hyperpod-eks", "gaudi"), ("ec2", "cpu")]
)
def test_booted_node_equals_one_tuned_over_ssh_after_reboots(
    lab: StartLab, tmp_path: Path, backend: str, kind: str
) -> None:
    fleet = Fleet(lab(2, kind), tmp_path, backend)
    tuned, booted = fleet.nodes
    blank = files(booted, "/etc")
    assert fleet.tune(tuned) == 0
    done = fleet.boot(booted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files(booted, "/etc") != blank
    same(tuned, booted)
    assert done.stdout == booted.read(LOG)

    before = files(booted, "/etc", "/var/lib/lustrain")
    assert fleet.boot(booted).returncode == 0
    assert files(booted, "/etc", "/var/lib/lustrain") == before
    same(tuned, booted)

    for node in (tuned, booted):
        node.reboot()
        assert fleet.tune(node, "--check") == 0
    assert not differing(files(booted, "/etc", "/var/lib/lustrain"), before)
    same(tuned, booted)


def test_a_new_machine_in_a_tuned_nodes_place_ends_as_that_was(lab: StartLab, tmp_path: Path) -> None:
    fleet = Fleet(lab(2, "cpu"), tmp_path, "ec2")
    stays, goes = fleet.nodes
    assert [fleet.tune(node) for node in (stays, goes)] == [0, 0]
    goes.replace()
    fleet.furnish(goes)
    assert fleet.boot(goes).returncode == 0
    same(stays, goes)
    assert fleet.tune(goes, "--check") == 0


def test_setting_no_longer_wanted_is_removed_without_trace(lab: StartLab, tmp_path: Path) -> None:
    fleet = Fleet(lab(2, "p5"), tmp_path, "machines")
    tuned, booted = fleet.nodes
    assert fleet.tune(tuned) == 0
    unwanted = ("nvme.scheduler", "gpu.application-clocks", "clock.source", "slurmd-limit.stack", "limit.memlock")
    fleet.switch(dict.fromkeys(unwanted, "off"))
    assert fleet.tune(tuned) == 0
    fleet.furnish(booted)
    assert fleet.boot(booted).returncode == 0
    for node in (tuned, booted):
        # What is in effect already, only a boot takes away.
        node.reboot()
        assert fleet.tune(node, "--check") == 0
    same(tuned, booted)


def test_node_that_lacks_a_must_fails_and_the_log_names_it(lab: StartLab, tmp_path: Path) -> None:
    fleet = Fleet(lab(1, "cpu"), tmp_path, "hyperpod-slurm")
    node = fleet.nodes[0]
    node.exec("rm", "-rf", "/etc/systemd/system/slurmd.service.d")
    node.write("/etc/systemd/system/slurmd.service.d", "a file where a folder should be\n")
    assert fleet.boot(node).returncode == 1
    log = node.read(LOG)
    assert "failed: slurmd-limit.memlock (must) " in log
    assert "this node may take no jobs: slurmd-limit.memlock\n" in log
    assert log.splitlines()[-1].endswith("lustrain: failed with 1")
    node.exec("rm", "/etc/systemd/system/slurmd.service.d")
    assert fleet.boot(node).returncode == 0
    assert fleet.tune(node, "--check") == 0


def test_bundle_ends_in_the_same_state_under_every_python(lab: StartLab, tmp_path: Path) -> None:
    found = {version: interpreter(version) for version in VERSIONS}
    pythons = [Path(path).resolve() for path in found.values() if path]
    missing = ", ".join(version for version, path in found.items() if not path)
    require(not missing, f"no Python {missing} on this machine")
    fleet = Fleet(lab(len(pythons) + 1, "cpu", folders=[path.parents[1] for path in pythons]), tmp_path, "ec2")
    tuned, *others = fleet.nodes
    assert fleet.tune(tuned) == 0
    for node, python in zip(others, pythons, strict=True):
        use_python(node, python)
        done = fleet.boot(node)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(node.read(owned.REPORT))["python"] in str(python)
        same(tuned, node)
