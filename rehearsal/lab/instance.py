"""Instances of a stack with a Slurm, made of nodes of the lab: what image and EC2 bring, and a boot by their user data.

Real: the user data, the lifecycle bundle, the agent, munge and Slurm. Not real: AWS's CLI (`aws_cli`), the role's credentials,
which are in a file, and the state volume, whose content is a folder that all nodes of the lab share.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from urllib.parse import urlsplit

from rehearsal.lab import aws_cli
from rehearsal.lab.node import Node
from rehearsal.lab.slurm import bring_packages

SHARED = "/run/simulated/fsx"
"""The folder that all nodes of a lab share."""
VOLUME_CONTENT, DISKS = "/var/lib/simulated/content", "/var/lib/simulated/disks.json"
USER_DATA = "/var/lib/cloud/instance/user-data.txt"
"""Where cloud-init keeps it."""
BOOT_LOG = "/var/log/lustrain-boot.log"
BOOT_S = 1800.0
"""More than what the user data gives its steps on a machine that is slow and not stuck."""


def bring_image(node: Node, environment: Mapping[str, str]) -> None:
    """Leave on a new machine what its image has and EC2 gives it: Slurm's packages, AWS's CLI, and the way to an AWS.

    `environment` has AWS_ENDPOINT_URL, on this machine's loopback, AWS_REGION and credentials.
    """
    bring_packages(node)
    endpoint = environment["AWS_ENDPOINT_URL"]
    place = urlsplit(endpoint)
    assert place.hostname is not None
    assert place.port is not None
    node.forward((place.hostname, place.port))
    node.write("/root/.aws/config", f"[default]\nregion = {environment['AWS_REGION']}\nendpoint_url = {endpoint}\n")
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    lines = [f"{key.lower()} = {environment[key]}\n" for key in keys if key in environment]
    node.write("/root/.aws/credentials", f"[default]\n{''.join(lines)}", 0o600)
    program = shlex.join([sys.executable, "-P", str(Path(aws_cli.__file__).resolve())])
    node.write("/usr/local/bin/aws", f'#!/bin/sh\nexport HOME=/root\nexec {program} "$@"\n', 0o755)


def take_address(node: Node, address: str) -> None:
    """Give a node a further address: the one that its network interface has in AWS."""
    node.exec("ip", "address", "replace", f"{address}/32", "dev", "eth0")


def route(node: Node, address: str, holder: Node) -> None:
    """Let a node reach another one at the address that it took, or will take: machines may boot in any order."""
    node.exec("ip", "route", "replace", f"{address}/32", "via", holder.address)


def attach_volume(node: Node, volume: str, disks: str | None = None) -> None:
    """Attach a volume of EBS; `disks` is what the lab has kept of it where it was formatted before (DISKS)."""
    node.write("/sys/block/nvme9n1/device/serial", volume.replace("-", "") + "\n")
    node.write("/sys/block/nvme9n1/device/model", "Amazon Elastic Block Store\n")
    node.write("/sys/block/nvme9n1/size", f"{20 * 2**21}\n")
    node.exec("truncate", "--size=20G", "/dev/nvme9n1")
    node.exec("ln", "-sf", "/opt/simulated/run", "/usr/local/bin/mkfs.xfs")
    node.exec("mkdir", "-p", VOLUME_CONTENT, f"{SHARED}/volume")
    node.exec("/usr/bin/mount", "--bind", f"{SHARED}/volume", VOLUME_CONTENT)
    if disks is not None:
        node.write(DISKS, disks)
        node.exec("sh", "-c", "printf XFSB | dd of=/dev/nvme9n1 conv=notrunc status=none")


def boot_by(node: Node, user_data: str) -> CompletedProcess[str]:
    """Run the user data as cloud-init does; its output is in BOOT_LOG."""
    node.write(USER_DATA, user_data, 0o700)
    return node.exec(USER_DATA, check=False, timeout=BOOT_S)
