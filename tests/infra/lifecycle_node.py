"""A folder that stands for a node, on which the lifecycle scripts run as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from infra.plan.nodes.bundle import AGENT, FOLDER, ON_CREATE, ON_INIT

SCRIPTS = sorted(FOLDER.glob("*.sh"))
EC2 = "first boot of EC2"
"""Has no script of its own in the bundle: user data sources node.sh and calls `boot`."""
ENTRIES = [ON_INIT, ON_CREATE, EC2]
LOG = "var/log/provision/provisioning.log"
TOOLS = ("bash", "chmod", "cmp", "cp", "date", "dirname", "grep", "ln", "mkdir", "sync", "tee")
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
        self.s3_seconds = "600"
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
        if entry == EC2:
            return self.run("-c", 'source "$1/node.sh" && boot "$1/node_setup.pyz" ec2', "boot", str(self.bundle))
        return self.run(str(self.bundle / entry))

    def run(self, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """What bash does with these words on the node."""
        environment = {
            "PATH": self.path,
            "LUSTRAIN_ROOT": str(self.root),
            "LUSTRAIN_WAIT_SECONDS": "10",
            "LUSTRAIN_AGENT_SECONDS": self.agent_seconds,
            "LUSTRAIN_S3_SECONDS": self.s3_seconds,
            "MOUNTS": str(self.mounts),
            "ASKED": str(self.asked),
            "KNOWN": self.known,
        }
        command = [*before, "bash", *words]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300)

    @property
    def log(self) -> str:
        return (self.root / LOG).read_text(encoding="utf-8")

    @property
    def scratch(self) -> Path:
        return (self.root / "scratch").readlink().relative_to(self.root)
