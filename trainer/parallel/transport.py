"""What NCCL sends over between nodes, seen from the devices that this process holds open once collectives have run.

NCCL says it only in a log of hundreds of lines a rank. Its plugin for EFA loads libfabric, which opens the EFA devices at once
and keeps them open (https://github.com/ofiwg/libfabric/blob/main/prov/efa/src/efa_device.c). Where NCCL does not find the
plugin, it takes TCP sockets without an error (https://github.com/NVIDIA/nccl/issues/959), at a fraction of the rate. Not
noticed here: a plugin that gives up after libfabric has opened the devices.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lustrain.problem import UserError, problem
from trainer.errors import EXIT_CONFIG
from trainer.parallel.agree import Json

AMAZON = "0x1d0f"
"""PCI vendor of EFA devices (https://pci-ids.ucw.cz/read/PC/1d0f)."""


@dataclass(frozen=True)
class Transport:
    """Names of a node's EFA devices, and of the RDMA devices that this process holds open."""

    efa: tuple[str, ...]
    opened: tuple[str, ...]

    def to_json(self) -> Json:
        return {"host": socket.gethostname(), "efa": list(self.efa), "opened": list(self.opened)}


def read_transport(sys: Path = Path("/sys/class"), descriptors: Path = Path("/proc/self/fd")) -> Transport:
    """Read the kernel's lists; both are empty where the node has no RDMA device."""
    vendors = {device.name: device / "device" / "vendor" for device in _entries(sys / "infiniband")}
    efa = sorted(name for name, vendor in vendors.items() if vendor.is_file() and vendor.read_text().strip() == AMAZON)
    nodes = {node.name: (node / "ibdev").read_text().strip() for node in _entries(sys / "infiniband_verbs")}
    targets = {Path(target).name for target in _targets(descriptors)}
    return Transport(tuple(efa), tuple(sorted(nodes[name] for name in targets & nodes.keys())))


def require_efa(answers: dict[int, Json], *, allow_sockets: bool) -> Json:
    """Return rank 0's transport, nothing where all ranks are on one host.

    UserError where a rank of several hosts uses none of its EFA devices, unless that is allowed.
    """
    if len({answer["host"] for answer in answers.values()}) == 1:
        return {}
    unused = {
        answer["host"] for answer in answers.values() if answer["efa"] and not {*answer["efa"]} & {*answer["opened"]}
    }
    if unused and not allow_sockets:
        first, *others = sorted(unused)
        hosts = f"{first} and {len(others)} more" if others else first
        why = f"NCCL uses none of the EFA devices of {hosts}, so gradients would go over TCP sockets"
        fix = (
            "set NCCL_NET_PLUGIN=ofi; `fab node-verify` names what a node lacks; a container needs /dev/infiniband and the "
            "plugin; or set it to true to train over sockets"
        )
        raise UserError(problem("parallel.allow_sockets", "false", why, fix=fix), EXIT_CONFIG)
    return answers[0]


def _entries(folder: Path) -> list[Path]:
    # Beside the devices there is a file `abi_version`.
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []


def _targets(descriptors: Path) -> Iterator[str]:
    for link in descriptors.iterdir():
        try:
            yield os.readlink(link)
        except FileNotFoundError:  # closed since it was listed
            continue
