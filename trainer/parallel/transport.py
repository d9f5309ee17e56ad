"""What NCCL sends over between nodes, seen from the devices that this process holds open once collectives have run.

NCCL says it only in a log of hundreds of lines a rank. A rank that uses EFA or InfiniBand holds its device nodes open
(https://docs.kernel.org/infiniband/user_verbs.html); where the plugin for EFA is missing, NCCL takes TCP sockets without an
error, at a tenth of the rate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lustrain.problem import UserError, problem
from trainer.errors import EXIT_CONFIG

AMAZON = "0x1d0f"
"""PCI vendor of EFA devices (https://pci-ids.ucw.cz/read/PC/1d0f)."""


@dataclass(frozen=True)
class Transport:
    """Names of a node's EFA devices, and of the RDMA devices that this process holds open."""

    efa: tuple[str, ...]
    opened: tuple[str, ...]


def read_transport(sys: Path = Path("/sys/class"), descriptors: Path = Path("/proc/self/fd")) -> Transport:
    """Read the kernel's lists; both are empty where the node has no RDMA device."""
    vendors = {device.name: device / "device" / "vendor" for device in _entries(sys / "infiniband")}
    efa = sorted(name for name, vendor in vendors.items() if vendor.is_file() and vendor.read_text().strip() == AMAZON)
    nodes = {node.name: (node / "ibdev").read_text().strip() for node in _entries(sys / "infiniband_verbs")}
    targets = {Path(target).name for target in _targets(descriptors)}
    return Transport(tuple(efa), tuple(sorted(nodes[name] for name in targets & nodes.keys())))


def require_efa(transport: Transport, *, allow_sockets: bool) -> None:
    """UserError where the node has EFA devices that a training over several nodes does not use, unless that is allowed."""
    if not transport.efa or set(transport.efa) & set(transport.opened) or allow_sockets:
        return
    why = f"NCCL uses none of this node's {len(transport.efa)} EFA devices, so gradients go over TCP sockets"
    fix = "`fab node-verify` names what is missing, a container needs /dev/infiniband; or set it to true to train so"
    raise UserError(problem("parallel.allow_sockets", False, why, fix=fix), EXIT_CONFIG)


def _entries(folder: Path) -> list[Path]:
    # Beside the devices there is a file `abi_version`.
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []


def _targets(descriptors: Path) -> Iterator[str]:
    for link in descriptors.iterdir():
        try:
            yield os.readlink(link)
        except FileNotFoundError:  # closed since it was listed
            continue
