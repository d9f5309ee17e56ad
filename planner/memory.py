"""What a strategy allocates on one GPU at its peak, from the shapes of what autograd keeps.

The terms are those of `trainer.tasks.models.llama` under autocast, and of FSDP2 with `trainer.parallel.fsdp`'s policy;
`tests/planner/test_planner_memory.py` holds them against what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.strategy import Strategy
from planner.work import Work


@dataclass(frozen=True)
class Kernels:
    """How kernels of a device differ in what they keep for backward."""

    norm_keeps_output: bool
    """RMSNorm is made of smaller operations, whose normalised fp32 copy is kept beside the input."""
    norm_returns_fp32: bool
    """Autocast computes RMSNorm in fp32, so that each matrix that reads its output keeps a copy of its own."""


CUDA = Kernels(norm_keeps_output=False, norm_returns_fp32=True)
"""torch has a fused RMSNorm since 2.9, which keeps the input and one number a token
(https://github.com/pytorch/pytorch/pull/153666), and lists it among what autocast does in fp32
(https://github.com/pytorch/pytorch/blob/v2.9.0/aten/src/ATen/autocast_mode.h)."""
CPU = Kernels(norm_keeps_output=True, norm_returns_fp32=False)


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at the peak. `gathered` are whole weights and gradients of what is computed now, and autocast's
    copies of weights; `working` is what exists for a moment beside them."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    working: int
    host: int = 0
    """Of the node's own memory, for this GPU: the states where they are offloaded."""

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations + self.working

    @property
    def state(self) -> int:
        """What is there between steps too."""
        return self.weights + self.gradients + self.optimizer


def memory(work: Work, strategy: Strategy, kernels: Kernels = CUDA) -> Memory:
    """Return the largest of several moments: at the loss, while blocks go backward, and at the end of backward."""
    parts = strategy.shard * strategy.tensor
    held = 4 * work.parameters // parts
    gradients = held
    # Earlier micro-batches add up in gradients of their own; only the last one's backward makes them views of DDP's buckets.
    beside_buckets = not work.bucket_views or work.micro_batches > strategy.data_ranks
    if not strategy.uses_fsdp and strategy.replicate > 1 and beside_buckets:
        gradients += held
    activations = _Activations(work, strategy, kernels)
    kept, loss = activations.kept, activations.loss
    optimizer, host = 2 * held, 0
    if strategy.uses_fsdp:
        gathered = _gathered(work, strategy)
        if work.offload:
            host = held + gradients + optimizer
            # Sums over earlier micro-batches stay on the GPU until they are summed over the replicas.
            summed = strategy.replicate > 1 and work.micro_batches > strategy.data_ranks
            held, gradients, optimizer = 0, gradients if summed else 0, 0
        moments = [
            (gathered.first, 0, 0),
            (gathered.loss, kept + loss.kept, loss.working),
            (gathered.block, kept, activations.block),
            (gathered.next_block, kept - activations.kept_of_block, activations.block),
            (gathered.embedding, 0, 0),
            (gathered.last, 0, 0),
        ]
    else:
        copies, head = _autocast_copies(work, strategy)
        after_forward = head if strategy.recompute != "none" else copies - head if activations.in_chunks else copies
        moments = [
            (copies, kept + loss.kept, loss.forward),
            (after_forward, kept + loss.kept, loss.working),
            (after_forward, kept, activations.block),
        ]
    return max(
        (Memory(held, gradients, optimizer, *moment, host) for moment in moments),
        key=lambda each: (each.total, each.gathered),
    )


@dataclass(frozen=True)
class _Loss:
    """Bytes of the last norm, the output layer and the loss: kept until backward, and beside that in forward and backward."""

    kept: int
    forward: int
    working: int


class _Activations:
    """Bytes that one micro-batch takes on a GPU.

    With tensor parallelism each GPU holds its part of the sequence or of the width, but for what `trainer.tasks.models.llama`'s
    `tensor_plan` makes whole: the input of matrix products is gathered from all positions, and kept so for backward.
    """

    def __init__(self, work: Work, strategy: Strategy, kernels: Kernels) -> None:
        self._work, self._kernels, self._tensor = work, kernels, strategy.tensor
        self._bytes = work.compute_bytes
        # The embedding is gathered in the format that is computed with, and what is added to it keeps that format.
        self._residual = work.compute_bytes if strategy.uses_fsdp else 4
        whole, recompute = self._block(), strategy.recompute
        of_block = {"none": whole, "selective": self._selective(), "full": self._part(self._residual * self._width)}
        kept = of_block[recompute]
        self.kept_of_block, self.kept = kept, work.shape.layers * kept
        recomputed = 0 if recompute == "none" else whole
        self.block = recomputed + self._part(
            2 * self._bytes * work.tokens * work.shape.hidden + (self._residual + 4) * self._width
        )

    @property
    def in_chunks(self) -> bool:
        """Logits exist for a part of the tokens at a time."""
        return 0 < self._work.loss_chunk < self._work.tokens

    @property
    def _width(self) -> int:
        return self._work.tokens * self._work.shape.width

    def _part(self, count: int) -> int:
        return count // self._tensor

    def _norm(self) -> int:
        return (8 if self._kernels.norm_keeps_output else 4) * self._width

    def _attention_output(self) -> int:
        return self._bytes * self._width + 4 * self._work.tokens * self._work.shape.heads

    def _block(self) -> int:
        """Return the bytes of a whole block: under autocast each matrix that reads a norm's output keeps a copy of its own."""
        work, tokens, e = self._work, self._work.tokens, self._bytes
        copied = e < 4 and (self._residual == 4 or self._kernels.norm_returns_fp32)
        inputs = (5 if copied else 2) * e * self._width
        attention = e * (self._width + 2 * tokens * work.kv_width) + self._attention_output()
        return self._part(2 * self._norm() + attention + 4 * e * tokens * work.shape.hidden) + inputs

    def _selective(self) -> int:
        """Attention and every second matrix product: query, value, gate, down (`trainer.step.recompute`).

        Each tensor rank's product of `down` has the whole width, before the ranks' are summed.
        """
        work, e = self._work, self._bytes
        products = e * work.tokens * (work.shape.width + work.kv_width + work.shape.hidden)
        down = e * self._width
        return self._part(self._residual * self._width + products + self._attention_output()) + down

    @property
    def loss(self) -> _Loss:
        """Logits are fp32 in the loss: their logarithms are kept, and two gradients of that size exist beside them.

        Over tensor ranks three do: backward is made of operations, one for the classes' probabilities, of which each makes a
        tensor (`_nll_loss_and_log_softmax_backward`,
        https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/tensor/parallel/loss.py).
        """
        work, e = self._work, self._bytes
        kept = self._part(self._norm()) + e * self._width
        gradients = 2 if self._tensor == 1 else 3
        if self.in_chunks:
            logits, head = 4 * work.loss_chunk * work.shape.vocab_size, work.shape.vocab_size * work.shape.width
            # Each chunk casts the output layer anew and adds to its fp32 gradient.
            copy = e * head if e < 4 else 0
            working = (1 + gradients) * logits + 4 * head + copy
            return _Loss(kept, self._part(2 * logits), self._part(working))
        logits = 4 * work.tokens * work.shape.vocab_size
        return _Loss(kept + self._part(logits), self._part(logits), self._part(gradients * logits))


def _autocast_copies(work: Work, strategy: Strategy) -> tuple[int, int]:
    """Return the bytes of the weights in the format that is computed with, of which autocast makes copies and keeps them to
    the end of its forward pass: of all, and of the output layer, which is never recomputed."""
    if work.compute_bytes == 4:
        return 0, 0
    head = work.shape.vocab_size * work.shape.width
    matrices = work.shape.layers * sum(work.block_matrices) + head
    return work.compute_bytes * matrices // strategy.tensor, work.compute_bytes * head // strategy.tensor


@dataclass(frozen=True)
class _Gathered:
    """Bytes of whole weights and gradients at moments of a step, in their order."""

    first: int
    """As the embedding is gathered, before any block."""
    loss: int
    block: int
    """While a block goes backward, and none before it has."""
    next_block: int
    """While a block goes backward, and the gradients of the one before it are reduced."""
    embedding: int
    """While the embedding goes backward."""
    last: int
    """As the output layer's gradients are reduced."""


def _gathered(work: Work, strategy: Strategy) -> _Gathered:
    """Count what FSDP2 holds.

    The unit of output layer and tied embedding stays gathered from forward until its gradients are reduced. An embedding of
    its own is there in its forward only, and its gradients wait for those of the output layer; those of a tied one are added
    to the output layer's in new memory. What a unit was gathered into is there until the next one is gathered, beside the
    weights. A block's weights are there with the next one's.
    All gradients are reduced in fp32, those of a block while the next one is computed. With replicas its shard is there twice
    more: the sum over earlier micro-batches, and what is summed over the replicas. The output layer's reduced shard is there
    beside all of its gradients, until it is added to that of earlier micro-batches: `reduce_output` of torch's `foreach_reduce`
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    e = work.compute_bytes
    block, outer = work.block_parameters // strategy.tensor, work.outer_parameters // strategy.tensor
    head = work.shape.vocab_size * work.shape.width // strategy.tensor
    table = work.table_parameters // strategy.tensor
    root = outer - table
    kept = root if work.reshard else outer
    blocks = 1 if work.reshard else work.shape.layers
    shards = 2 * 4 * block // strategy.shard if strategy.replicate > 1 else 0
    # An offloaded unit's fp32 shard is on the GPU while it goes in, and its gradients' while they go out.
    moving = 4 * max(block, outer) // strategy.shard if work.offload else 0
    of_block = e * (kept + max(2, blocks) * block + head)
    return _Gathered(
        first=2 * e * outer + moving,
        loss=e * (kept + blocks * block),
        block=of_block + moving,
        next_block=of_block + 4 * block + shards + moving,
        embedding=e * (kept + root + (2 if work.shape.tied else 1) * head) + 4 * block + moving,
        last=(e + 4) * root + 4 * root // strategy.shard + e * (table + kept - root),
    )
