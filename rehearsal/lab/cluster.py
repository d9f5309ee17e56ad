"""The Cluster file of a lab: its nodes as machines that exist already, with a file system to mount."""

from __future__ import annotations

from collections.abc import Mapping

from lustrain.cluster import Access, Capacity, Cluster, FileSystem, NodeGroup, Nodes, Stripe, Tuning
from rehearsal.lab.hardware import KINDS
from rehearsal.lab.nodes import Lab

GROUP = "train"
MOUNT = "/fsx"


def cluster_of(lab: Lab, settings: Mapping[str, str] | None = None) -> Cluster:
    """Return all nodes of a lab as one group, which are of one kind; `settings` is what its tuning does otherwise."""
    kind = KINDS[lab.nodes[0].kind]
    stripe = Stripe(
        path=f"{MOUNT}/checkpoints", options=("-c", "-1", "-S", "16M"), why="large files, written by all nodes"
    )
    lustre = FileSystem(
        id="fs-0123456789abcdef0",
        dns_name="fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com",
        mount_name="xeo3rbev",
        path=MOUNT,
        efa=kind.efa > 0,
        stripes=(stripe,),
    )
    group = NodeGroup(
        type=kind.type or "machine",
        count=len(lab.nodes),
        gpus=kind.gpus or kind.gaudis,
        efa=kind.efa,
        nvme=kind.disks,
        lustre_efa=min(8, kind.efa) if kind.lustre else 0,
    )
    return Cluster(
        name="lab",
        backend="machines",
        nodes=Nodes(addresses=tuple(node.address for node in lab.nodes)),
        reach=Access(via="ssh", user="root", key=lab.key),
        groups={GROUP: group},
        tuning=Tuning(settings=dict(settings or {})),
        lustre=lustre if kind.lustre else None,
        runs_uri=f"{MOUNT}/runs",
        capacity=Capacity(mode="owned"),
    )
