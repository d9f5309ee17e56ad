"""How long a step takes: computation, and the communication that it does not hide.

Blocks are computed one after the other while their weights and gradients are exchanged; what takes longer counts. That the two
slow each other down is not in it, nor are loading of data, kernel launches and the optimizer, which a measured MFU contains.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.hardware import Node
from planner.strategy import Strategy
from planner.work import Work

COPY_BYTES_S = 20e9
"""Between a GPU and its host: half of what PCIe 5.0 x16 carries. Assumed."""
HOST_BYTES_S = 100e9
"""What AdamW on a node's cores reads and writes in a second. Assumed."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: `compute` with its recomputation, and what waits for the network beside it."""

    compute: float
    exposed: float
    micro_batches: int
    """Micro-batches of each rank; ranks without one of their own wait as long."""

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def recomputed_share(work: Work, strategy: Strategy) -> float:
    """Return the operations of recomputation, as a part of those of forward and backward."""
    if strategy.recompute == "none":
        return 0.0
    blocks = 6.0 * work.shape.layers * sum(work.block_matrices)
    attention = 12.0 * work.shape.layers * work.shape.width * work.seq_len
    if strategy.recompute == "full":
        again = (blocks + attention) / 3
    else:
        # Attention is kept, and of the matrices every other one, from the first on.
        again = 2.0 * work.shape.layers * sum(work.block_matrices[1::2])
    return again / work.flops_per_token


def step_time(work: Work, strategy: Strategy, node: Node, nodes: int, efficiency: float) -> StepTime:
    """Return the time of a step with `efficiency` as the share of the GPU's peak while nothing waits for another GPU."""
    micro_batches = -(-work.micro_batches // strategy.data_ranks)
    flops = work.tokens * work.flops_per_token / strategy.tensor
    passes = flops / (node.flops(work.precision) * efficiency)
    compute = passes * (1 + recomputed_share(work, strategy))
    # Backward does twice the operations of forward, and all that is recomputed.
    forward, backward = passes / 3, compute - passes / 3
    exposed = _tensor(work, strategy, node) * micro_batches
    if strategy.uses_fsdp:
        exposed += _sharded(work, strategy, node, nodes, forward, backward, micro_batches)
        if work.offload:
            exposed += _offloaded(work, strategy, node, compute * micro_batches, micro_batches)
    else:
        exposed += _replicated(work, strategy, node, nodes, backward)  # In the last micro-batch alone.
    return StepTime(compute * micro_batches, exposed, micro_batches)


def _replicated(work: Work, strategy: Strategy, node: Node, nodes: int, backward: float) -> float:
    """DDP sums gradients in fp32 during the last backward pass; those that are ready last are never hidden."""
    embedding = work.shape.vocab_size * work.shape.width
    whole, last = (node.reduce_s(4 * count, strategy.replicate, nodes) for count in (work.parameters, embedding))
    return max(whole - backward, last)


def _sharded(
    work: Work, strategy: Strategy, node: Node, nodes: int, forward: float, backward: float, micro_batches: int
) -> float:
    """FSDP2 gathers each block for forward and, where it was freed, for backward, and scatters its gradients, in every
    micro-batch; HSDP sums the shards over replicas in the last one."""
    e, layers, tensor = work.compute_bytes, work.shape.layers, strategy.tensor
    on_node = min(tensor, node.gpus)
    shard_nodes = max(1, strategy.shard * on_node * nodes // strategy.gpus)
    block, outer = work.block_parameters // tensor, work.outer_parameters // tensor

    def gather(elements: int, size: int) -> float:
        # With tensor parallelism the GPUs of a node gather different parts, all through its network.
        return node.gather_s(elements * size * (on_node if shard_nodes > 1 else 1), strategy.shard, shard_nodes)

    forward_one, backward_one = forward / layers, backward / layers
    gathers = gather(block, e)
    first = gather(outer, e) + gathers
    in_forward = max(0.0, gathers - forward_one) * (layers - 1)
    exchanged = gather(block, 4) + (gathers if work.reshard else 0.0)
    in_backward = max(0.0, exchanged - backward_one) * (layers - 1)
    last = gather(outer, 4)
    exposed = micro_batches * (first + in_forward + in_backward + last)
    if strategy.replicate > 1:
        shards = 4 * work.parameters // (strategy.shard * tensor)
        local = node.gpus // max(1, strategy.replicate // nodes)
        over = node.reduce_s(shards, strategy.replicate, min(nodes, strategy.replicate), per_node=local)
        exposed += max(over - backward, over * outer / (work.parameters // tensor))
    return exposed


def _offloaded(work: Work, strategy: Strategy, node: Node, compute: float, micro_batches: int) -> float:
    """Shards in host memory are copied in for each gather, gradients out, as far as possible beside the computation; then the
    host's cores step, which read weight, gradient and two moments and write all but the gradient."""
    held = 4 * work.parameters // (strategy.shard * strategy.tensor)
    copies = (3 if work.reshard else 2) * micro_batches * held / COPY_BYTES_S
    return max(0.0, copies - compute) + 7 * held * node.gpus / HOST_BYTES_S


def _tensor(work: Work, strategy: Strategy, node: Node) -> float:
    """Tensor parallelism with a divided sequence gathers and scatters activations twice a block, forward and backward; each
    waits for it, and where there are more tensor ranks than a node has GPUs, for the network between nodes."""
    if strategy.tensor == 1:
        return 0.0
    count = work.tokens * work.shape.width * work.compute_bytes
    return 8 * work.shape.layers * node.gather_s(count, strategy.tensor, -(-strategy.tensor // node.gpus))


LEAST_EFFICIENCY = 0.001
"""Below it a run was not on the GPU that the plan is for."""


def efficiency_of(work: Work, strategy: Strategy, node: Node, nodes: int, measured_s: float) -> float | None:
    """Return the efficiency with which `step_time` gives a measured time; None where none from LEAST_EFFICIENCY to 1 does."""
    low, high = LEAST_EFFICIENCY, 1.0
    if not step_time(work, strategy, node, nodes, high).total <= measured_s:
        return None
    if step_time(work, strategy, node, nodes, low).total < measured_s:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if step_time(work, strategy, node, nodes, middle).total > measured_s else (low, middle)
        )
    return high


def mfu(work: Work, node: Node, gpus: int, seconds: float) -> float:
    """Return model FLOPs utilization: operations of forward and backward, of what `gpus` could do in `seconds` of a step
    (https://arxiv.org/abs/2204.02311, appendix B)."""
    return work.tokens_per_step * work.flops_per_token / (seconds * gpus * node.flops(work.precision))
