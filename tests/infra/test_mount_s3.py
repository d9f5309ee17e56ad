"""Nodes mount the buckets of storage.s3_mounts at boot, with a client that AWS signed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.plan.nodes.bundle import MOUNT_S3, ON_INIT, PACKAGES
from infra.plan.place import Place
from infra.plan.stack import Plan
from lustrain.problem import UserError
from tests.conftest import require
from tests.infra.edits import spec_of
from tests.infra.lifecycle_node import EC2, Node

MOUNTS = [
    {"bucket": "data", "path": "/s3/data"},
    {"bucket": "theirs", "prefix": "out", "path": "/s3/out-put", "read_only": False, "region": "eu-west-1"},
]
UNITS = ("lustrain-s3-s3-data.service", "lustrain-s3-s3-out--put.service")
SYSTEMCTL = """#!/bin/bash
echo "$*" >>"$ASKED"
[[ "$1" != start ]] || for path in data out-put; do
  mkdir -p "$LUSTRAIN_ROOT/s3/$path" && touch "$LUSTRAIN_ROOT/s3/$path/.mounted"
done
"""
CURL = '#!/bin/bash\nwhile (($# > 2)); do shift; done\necho "$2" >>"$MOUNTS"\necho "$2" >"$1"\n'
GPG = '#!/bin/bash\n[[ "$*" != *--verify* ]] || echo "[GNUPG:] VALIDSIG 1 2026-01-01 1 0 4 0 1 10 00 {signer}"\n'
SIGNER = "8AEFE705EBE329C0948C75A66F1C3B3AEF4B030B"
OLDER = "673FE4061506BB469A0EF857BE397A52B086DA5A"


def plan(stack: str, **edits: Any) -> Plan:
    spec = spec_of(stack, {"storage.s3_mounts": MOUNTS, **edits})
    return Plan(spec, Place("us-east-1", "123456789012"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    for file in plan("ec2-spot-g6e").bundle.files:
        if file.path in (MOUNT_S3.name, PACKAGES.name) or file.path.startswith("s3_mounts/"):
            (node.bundle / file.path).parent.mkdir(exist_ok=True)
            (node.bundle / file.path).write_bytes(file.content)
    node.command("systemctl", SYSTEMCTL)
    node.command("curl", CURL)
    node.command("uname", "#!/bin/bash\necho aarch64\n")
    node.command("apt-get", '#!/bin/bash\necho "apt-get $*" >>"$MOUNTS"\n')
    node.command("gpg", GPG.format(signer=SIGNER))
    return node


def test_unit_mounts_as_the_spec_says() -> None:
    files = {file.path: file.content.decode() for file in plan("ec2-spot-g6e").bundle.files if file.path[:3] == "s3_"}
    assert set(files) == {"s3_mounts/list", *(f"s3_mounts/{unit}" for unit in UNITS)}
    commands = [
        line.partition("env ")[2]
        for unit in UNITS
        for line in files[f"s3_mounts/{unit}"].splitlines()
        if line.startswith("ExecStart=")
    ]
    assert commands == [
        "mount-s3 spot-g6e-data-123456789012-us-east-1 /s3/data --allow-other --region us-east-1 --read-only",
        "mount-s3 theirs /s3/out-put --allow-other --region eu-west-1 --prefix=out/ --allow-delete --dir-mode 0777 "
        "--file-mode 0666",
    ]
    # Where there is a proxy, only what is in another region goes through it.
    assert ["EnvironmentFile=-/etc/lustrain/proxy.env\n" in files[f"s3_mounts/{unit}"] for unit in UNITS] == [
        False,
        True,
    ]


def test_long_prefix_that_is_none_is_one_line() -> None:
    with pytest.raises(UserError, match="a prefix of letters"):
        plan("ec2-spot-g6e", **{"storage.s3_mounts": [{**MOUNTS[0], "prefix": "a" * 60 + " "}]})


@pytest.mark.slow
def test_systemd_accepts_the_units(node: Node) -> None:
    require(shutil.which("systemd-analyze"), "needs systemd-analyze")
    for unit in UNITS:
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(node.bundle / "s3_mounts" / unit)],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, unit in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("entry", [ON_INIT, EC2])
def test_image_with_a_client_downloads_nothing(node: Node, entry: str) -> None:
    node.command("mount-s3", "#!/bin/bash\n")
    assert node.boot(entry).returncode == 0
    asked = node.asked.read_text().splitlines()
    assert asked == ["daemon-reload", *(f"{verb} {unit}" for unit in UNITS for verb in ("enable", "start"))]
    assert {path.name for path in (node.root / "etc/systemd/system").iterdir()} == set(UNITS)
    assert not node.mounts.exists()


def test_signed_client_is_installed(node: Node) -> None:
    assert node.boot(ON_INIT).returncode == 0
    release = "https://s3.amazonaws.com/mountpoint-s3-release"
    package = f"{release}/1.24.0/arm64/mount-s3-1.24.0-arm64.deb"
    lines = node.mounts.read_text().splitlines()
    assert lines[:3] == [f"{release}/public_keys/KEYS", package, f"{package}.asc"]
    assert lines[4].endswith("/mount-s3-1.24.0-arm64.deb")


def test_client_that_others_signed_fails_the_node(node: Node) -> None:
    node.command("gpg", GPG.format(signer=OLDER))
    assert node.boot(ON_INIT).returncode == 1
    assert "mount-s3-1.24.0-arm64.deb is not signed by AWS's key for Mountpoint" in node.log
    assert "apt-get" not in node.mounts.read_text()
    assert not node.asked.exists()


def test_bucket_that_cannot_be_mounted_fails_the_node(node: Node) -> None:
    node.command("mount-s3", "#!/bin/bash\n")
    node.command("systemctl", '#!/bin/bash\n[[ "$1" != start ]]\n')
    assert node.boot(ON_INIT).returncode == 1
    assert f"no bucket is mounted at /s3/data; fix: journalctl -u {UNITS[0]}" in node.log
    assert node.waits.count("10") == 10


@pytest.mark.parametrize("entry", [ON_INIT, EC2])
def test_mount_that_hangs_is_ended_and_fails_the_node(node: Node, entry: str) -> None:
    node.command("mount-s3", "#!/bin/bash\n")
    node.command("systemctl", '#!/bin/bash\n[[ "$1" != start ]] || exec /bin/sleep 3600\n')
    node.s3_seconds = "1"
    assert node.boot(entry).returncode == 124
    assert "mounting the buckets was ended: not done in 1 s" in node.log


def test_another_bucket_of_the_users_makes_another_bundle() -> None:
    first, second = (plan("ec2-spot-g6e", **{"buckets.data": name}).bundle for name in ("mine", "theirs"))
    assert first.sha != second.sha
