"""The lifecycle scripts on EKS: containerd and kubelet lie on a disk that is large enough, now and at every boot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from infra.plan.nodes.bundle import ON_CREATE
from tests.conftest import require
from tests.infra.lifecycle_node import LOG, Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def on_eks(node: Node) -> Node:
    """An image of EKS brings a pause container along, and HyperPod mounts the group's volume."""
    pause = node.root / "var/lib/containerd/content/pause"
    pause.parent.mkdir(parents=True)
    pause.write_text("image", encoding="utf-8")
    node.mount("opt/sagemaker")
    return node


@pytest.mark.slow
def test_on_eks_containerd_and_kubelet_lie_on_the_groups_volume(node: Node) -> None:
    on_eks(node)
    done = node.boot(ON_CREATE)
    assert done.returncode == 0, done.stdout + done.stderr
    disk = node.root / "opt/sagemaker/lustrain"
    bound = [line.split()[1:] for line in node.mounts.read_text().splitlines() if line.startswith("--bind")]
    assert bound == [[str(disk / name), str(node.root / "var/lib" / name)] for name in ("containerd", "kubelet")]
    assert (disk / "containerd/content/pause").read_text() == "image"
    assert "/var/lib/kubelet is on /opt/sagemaker" in node.log
    unit = (node.root / "etc/systemd/system/lustrain-container-data.service").read_text()
    assert "\nBefore=containerd.service kubelet.service\n" in unit
    assert "\nRequiredBy=containerd.service kubelet.service\n" in unit
    assert "\nExecStart=/usr/local/sbin/lustrain-container-data /opt/sagemaker\n" in unit
    assert os.access(node.root / "usr/local/sbin/lustrain-container-data", os.X_OK)
    assert "enable lustrain-container-data.service" in node.asked.read_text().splitlines()


@pytest.mark.slow
def test_on_eks_the_instance_store_is_taken_where_there_is_one(node: Node) -> None:
    on_eks(node).instance_store()
    node.mount("opt/dlami/nvme")
    assert node.boot(ON_CREATE).returncode == 0
    assert (node.root / "opt/dlami/nvme/lustrain/containerd/content/pause").exists()
    assert not (node.root / "opt/sagemaker/lustrain").exists()


@pytest.mark.slow
def test_on_eks_second_run_mounts_nothing_and_reboot_keeps_data(node: Node) -> None:
    on_eks(node).boot(ON_CREATE)
    first = node.mounts.read_text()
    assert node.boot(ON_CREATE).returncode == 0
    assert node.mounts.read_text() == first
    pulled = node.root / "opt/sagemaker/lustrain/containerd/content/pulled"
    pulled.write_text("image", encoding="utf-8")
    (node.root / "var/lib/containerd/.mounted").unlink()
    assert node.boot(ON_CREATE).returncode == 0
    assert pulled.exists()


def test_on_eks_what_another_root_disk_left_on_the_volume_goes(node: Node) -> None:
    """HyperPod updates a node's software by another root disk; the group's volume stays."""
    left = on_eks(node).root / "opt/sagemaker/lustrain/kubelet/cpu_manager_state"
    left.parent.mkdir(parents=True)
    left.touch()
    assert node.boot(ON_CREATE).returncode == 0
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize("running", [("containerd",), ("kubelet", "containerd")])
def test_on_eks_kubelet_is_stopped_first_and_started_last(node: Node, running: tuple[str, ...]) -> None:
    on_eks(node).known = "\n".join(f"is-active --quiet {name}.service" for name in running)
    assert node.boot(ON_CREATE).returncode == 0
    asked = [one for one in node.asked.read_text().splitlines() if one.startswith(("stop", "start"))]
    stops = [f"stop {name}.service" for name in running]
    assert asked == [*stops, *(f"start {name}.service" for name in reversed(running))]


@pytest.mark.slow
def test_on_eks_half_a_copy_is_not_the_whole_at_the_next_boot(node: Node) -> None:
    """Once the disk belongs to this root disk, a folder that is there is kept as it is."""
    on_eks(node).boot(ON_CREATE)
    (node.root / "var/lib/containerd/.mounted").unlink()
    copied = node.root / "opt/sagemaker/lustrain/containerd"
    shutil.rmtree(copied)
    node.command("cp", '#!/bin/bash\nmkdir -p "${@: -1}"\nexit 1\n')
    assert node.boot(ON_CREATE).returncode == 1
    (node.commands / "cp").unlink()
    assert node.boot(ON_CREATE).returncode == 0
    assert (copied / "content/pause").exists()


def test_on_eks_a_node_without_a_disk_fails_in_one_line(node: Node) -> None:
    assert node.boot(ON_CREATE).returncode == 1
    (line,) = [line for line in node.log.splitlines() if "would fill the root disk of 100 GB" in line]
    assert "fix: see why neither the group's EBS volume (/opt/sagemaker) nor instance store is there" in line
    assert not node.mounts.exists()


def after_the_first_boot(node: Node) -> Path:
    """Everything is in place, then the power goes: nothing is mounted and nothing logged. The group's volume."""
    assert on_eks(node).boot(ON_CREATE).returncode == 0
    disk = node.root / "opt/sagemaker"
    for folder in (disk, node.root / "var/lib/containerd", node.root / "var/lib/kubelet"):
        (folder / ".mounted").unlink()
    (node.root / LOG).unlink()
    node.mounts.unlink()
    return disk


def later_boot(node: Node) -> subprocess.CompletedProcess[str]:
    """What the unit runs."""
    return node.run(str(node.root / "usr/local/sbin/lustrain-container-data"), "/opt/sagemaker")


def test_on_eks_containerd_and_kubelet_wait_for_a_late_disk(node: Node) -> None:
    """A unit that gave up would leave them dead: systemd does not start again what depended on a failure."""
    disk = after_the_first_boot(node)
    mounts_at_last = f'[[ "$(wc -l <{node.waited})" -lt 4 ]] || touch {disk}/.mounted'
    node.command("sleep", f'#!/bin/bash\necho "$1" >>{node.waited}\n{mounts_at_last}\n')
    done = later_boot(node)
    assert done.returncode == 0, done.stdout + done.stderr
    assert node.log.count("containerd and kubelet wait for /opt/sagemaker") == 1
    assert "/var/lib/kubelet is on /opt/sagemaker" in node.log
    unit = (node.root / "etc/systemd/system/lustrain-container-data.service").read_text()
    assert "\nTimeoutStartSec=0\n" in unit


def test_on_eks_a_disk_that_comes_back_empty_starts_no_kubelet(node: Node) -> None:
    disk = after_the_first_boot(node)
    shutil.rmtree(disk / "lustrain")
    (disk / ".mounted").touch()
    assert later_boot(node).returncode == 1
    (line,) = node.log.splitlines()
    assert "/opt/sagemaker came back empty" in line
    assert "this node has to join again; fix: replace the node" in line
    assert not node.mounts.exists()


def test_on_eks_the_mounts_are_real_and_pods_are_not_seen_twice(node: Node) -> None:
    """With the real mount(8), in a mount namespace of its own: what is written to the folder lies on the disk."""
    require(os.geteuid() == 0, "needs root, for mounts in a namespace")
    on_eks(node)
    for name in ("mount", "mountpoint"):
        (node.commands / name).unlink()
    script = """
    mount -t tmpfs disk "$LUSTRAIN_ROOT/opt/sagemaker" && mount --make-shared "$LUSTRAIN_ROOT/opt/sagemaker"
    for run in first second; do bash "$0" /opt/sagemaker || exit 1; done
    touch "$LUSTRAIN_ROOT/var/lib/kubelet/written"
    mkdir "$LUSTRAIN_ROOT/var/lib/kubelet/pod" && mount -t tmpfs pod "$LUSTRAIN_ROOT/var/lib/kubelet/pod"
    ls "$LUSTRAIN_ROOT/opt/sagemaker/lustrain/kubelet" "$LUSTRAIN_ROOT/var/lib/containerd/content"
    grep -c " pod " /proc/self/mountinfo
    """
    done = node.run("-c", script, str(node.bundle / "container_data.sh"), before=("unshare", "--mount"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is on /opt/sagemaker") == 2
    assert {"written", "pod", "pause"} <= set(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "1"
