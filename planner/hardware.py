"""Nodes as the planner sees them: what their GPUs compute and hold, and how fast they exchange data."""

from __future__ import annotations

from dataclasses import dataclass

from infra.catalog.instances import Instance, instance, snapshot
from lustrain.accelerators import PEAKS, Peak
from lustrain.problem import UserError, did_you_mean, problem
from trainer.config import PrecisionConfig

LINK_SHARE = 0.8
"""Share of a link's rate that collectives reach. Between nodes 78.3 GB/s were measured on two p4de, where the law below gives
93.6 at full rate (`node_setup/settings/floors.toml`, which has their page); docs/plan.md has the law beside the other types."""
IN_SWITCH = 4 / 3
"""By how much the sums in NVSwitch speed up an all-reduce from Hopper on: 479 GB/s were measured on two p5 (the same file),
where links alone would give 360."""
PCIE_SHARE = 0.25
"""Share of PCIe's rate that collectives reach: without NVLink data pass through the host, in and out, beside those of the
other GPUs. Assumed."""
HOP_S = 48e-6
"""Seconds of one message from node to node. Fitted to one figure: FSDP of a 7 B model loses 37 % of its speed a GPU between
128 and 2,048 H100 (https://arxiv.org/abs/2411.13055), taken as two samples of 4,096 tokens a GPU."""
LOCAL_HOP_S = 5e-6
"""Seconds of one message between GPUs of a node. Assumed."""
RESERVED_BYTES = 2 * 2**30
"""Bytes of each GPU that tensors cannot have: the CUDA context, and NCCL's and cuBLAS's buffers. Assumed."""
FRAGMENTATION = 0.05
"""Share of the rest, which the allocator holds in pieces that fit nothing. Assumed."""


@dataclass(frozen=True)
class Node:
    """A node of one instance type; its figures are of one GPU, but for the network's."""

    type: str
    gpus: int
    gpu: str
    gpu_bytes: int
    peak: Peak
    network_gb_s: float
    efa: bool
    host_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Bytes of a GPU's memory that tensors can have."""
        return int((self.gpu_bytes - RESERVED_BYTES) * (1 - FRAGMENTATION))

    def flops(self, precision: PrecisionConfig) -> float:
        """Return a GPU's dense peak with these settings; 0 where it has no units for them."""
        if precision.mode == "bf16":
            return self.peak.bf16
        if precision.mode == "fp16":
            return self.peak.fp16
        return self.peak.fp32 if precision.matmul == "highest" or not self.peak.tf32 else self.peak.tf32

    @property
    def link_gb_s(self) -> float:
        """What collectives reach between the GPUs of a node."""
        return self.peak.link_gb_s * (LINK_SHARE if self.peak.nvlink else PCIE_SHARE)

    def gather_s(self, count: int, ranks: int, nodes: int) -> float:
        """Return the seconds of an all-gather to `count` bytes on each of `ranks` GPUs on `nodes`; a reduce-scatter takes as
        long.

        All but a rank's own part passes its link, all but a node's own part the node's network. A ring passes them in as many
        messages as it has links, within a node beside those between nodes.
        """
        if ranks < 2:
            return 0.0
        inside = count * (ranks - 1) / ranks / (self.link_gb_s * 1e9)
        between = count * (nodes - 1) / nodes / (self.network_gb_s * 1e9 * LINK_SHARE) if nodes > 1 else 0.0
        return max(inside, between) + self._latency(ranks, nodes)

    def reduce_s(self, count: int, ranks: int, nodes: int, *, per_node: int = 0) -> float:
        """Return the seconds of an all-reduce of `count` bytes over `ranks` GPUs on `nodes`.

        `per_node`: how many such groups share the network of a node, each with `count` bytes of its own.
        """
        if ranks < 2:
            return 0.0
        sharing = per_node or 1
        in_switch = IN_SWITCH if self.peak.nvlink and self.peak.link_gb_s >= 450 else 1.0
        local = ranks // nodes
        inside = 2 * count * (ranks - 1) / ranks / (self.link_gb_s * 1e9 * in_switch) if local > 1 else 0.0
        network = self.network_gb_s * 1e9 * LINK_SHARE
        between = 2 * sharing * count * (nodes - 1) / nodes / network if nodes > 1 else 0.0
        return max(inside, between) + 2 * self._latency(ranks, nodes)

    @staticmethod
    def _latency(ranks: int, nodes: int) -> float:
        return (nodes - 1) * HOP_S + (ranks // nodes - 1) * LOCAL_HOP_S


def node_of(type_name: str) -> Node:
    """Return a node of an instance type in the catalogue. UserError where it is unknown, or has no GPU of a known peak."""
    known = instance(type_name)
    if known is None:
        near = did_you_mean(type_name.removeprefix("ml."), snapshot().types)
        fix = near or "give the name of an EC2 instance type, like p5.48xlarge"
        raise UserError(problem("--instance-type", type_name, "is not in the catalogue of instance types", fix=fix))
    return _node(known)


def _node(known: Instance) -> Node:
    gpus = [device for device in known.accelerators if device.name in PEAKS and device.count]
    if not gpus:
        has = ", ".join(device.name for device in known.accelerators) or "no GPU"
        allowed = "types with " + ", ".join(name.removeprefix("NVIDIA ") for name in PEAKS)
        why = f"has {has}, of which no peak is known"
        raise UserError(problem("--instance-type", known.name, why, allowed=allowed, fix="choose another type"))
    (gpu,) = gpus
    return Node(
        known.name,
        gpu.count,
        gpu.name,
        gpu.memory_mib * 2**20,
        PEAKS[gpu.name],
        known.network_gbit / 8,
        bool(known.efa),
        known.memory_mib * 2**20,
    )


def nodes_for(precision: PrecisionConfig) -> list[Node]:
    """Return a node of every type in the catalogue that can compute with these settings."""
    nodes = [
        _node(known)
        for known in snapshot().types.values()
        if any(device.name in PEAKS and device.count for device in known.accelerators)
    ]
    return [node for node in nodes if node.flops(precision)]
