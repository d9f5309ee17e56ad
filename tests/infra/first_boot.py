"""A node's first boot in a folder: the real script, and stand-ins for the commands that touch the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.config import ClusterSpec, parse
from infra.plan.nodes.user_data import user_data
from infra.plan.place import Place

PLACE = Place("us-west-2", "123456789012")
LUSTRE: dict[str, Any] = {"lustre_dns": "fs-0a.fsx.us-west-2.amazonaws.com", "lustre_mount_name": "abcd1234"}
HOME: dict[str, Any] = {"home_dns": "fs-0b.fsx.us-west-2.amazonaws.com"}


def spec(kind: str = "p5.48xlarge", count: int = 4, **changes: Any) -> ClusterSpec:
    return parse(
        {
            "name": "demo",
            "backend": "ec2",
            "zone_id": "usw2-az2",
            "groups": [{"name": "train", "instance_type": kind, "count": count}],
            "storage": {"lustre": {"throughput_gb_s": 4.8}, "home": {}},
            **changes,
        }
    )


def over_tcp() -> ClusterSpec:
    return spec(storage={"lustre": {"throughput_gb_s": 4.8, "efa": False}, "home": {}})


def script(wanted: ClusterSpec | None = None, **given: Any) -> str:
    wanted = wanted or spec()
    return user_data(wanted, PLACE, wanted.workers[0], **given)


class Node:
    """A folder that stands for a node's root; commands that touch the machine are written down, not run."""

    COMMANDS = (
        "modprobe",
        "mount",
        "umount",
        "mountpoint",
        "systemctl",
        "apt-get",
        "aws",
        "snap",
    )

    def __init__(self, folder: Path, answers: Mapping[str, str] | None = None) -> None:
        self.root, self.calls_file, tools = folder / "root", folder / "calls", folder / "bin"
        for path in (self.root, tools):
            path.mkdir(parents=True)
        for name in (*self.COMMANDS, "mount.nfs4"):
            body = (answers or {}).get(name, "")
            (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{body}\n')
            (tools / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "LUSTRAIN_ROOT": str(self.root),
            "LUSTRAIN_PAUSE_SECONDS": "0",
            "LUSTRAIN_WAIT_SECONDS": "0",
            "LUSTRAIN_FLUSH_SECONDS": "0",
        }

    def boot(self, text: str) -> int:
        """The first boot, by cloud-init."""
        part = self.root / "part-001"
        part.write_text(text)
        return subprocess.run(["bash", part], env=self.environment, check=False).returncode

    def reboot(self) -> int:
        """A later boot, by the unit that the first one made."""
        copy = self.root / "usr/local/sbin/lustrain-boot"
        return subprocess.run(["bash", copy], env=self.environment, check=False).returncode

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def first(self, start: str) -> int:
        """Which call was the first that begins so."""
        return next(number for number, call in enumerate(self.calls) if call.startswith(start))

    @property
    def outcome(self) -> str:
        return (self.root / "var/lib/lustrain/boot").read_text().strip()


NOT_MOUNTED = "exit 1"
