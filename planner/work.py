"""What is trained, as numbers: the model, its batches, and how its parameters divide over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config import PrecisionConfig
from trainer.tasks.models import llama
from trainer.tasks.models.llama import LlamaShape

Recompute = Literal["none", "selective", "full"]
FP32 = PrecisionConfig()
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: the fp32 weight and AdamW's two moments."""


@dataclass(frozen=True)
class Work:
    """A language model and its batches; `loss_chunk` 0: all tokens' logits at once."""

    shape: LlamaShape
    seq_len: int
    global_batch: int
    micro_batch: int
    loss_chunk: int = 0
    precision: PrecisionConfig = FP32
    bucket_views: bool = True
    """DDP's gradients are views of its buckets (`parallel.gradient_as_bucket_view`)."""
    reshard: bool = True
    """FSDP2 frees a block's gathered weights after its forward pass (`parallel.reshard`)."""
    offload: bool = False
    """FSDP2 keeps weights, gradients and optimizer state in host memory (`parallel.offload`)."""
    compiled: bool = False
    """By `train.compile`, with which the trainer splits no layer over tensor ranks."""

    @property
    def parameters(self) -> int:
        return llama.parameters(self.shape)

    def can_split(self, tensor: int) -> bool:
        """Check that the trainer can split the model over so many tensor ranks."""
        return not self.compiled and not llama.tensor_problems(self.shape, tensor, length=self.seq_len, prefix="task")

    @property
    def block_matrices(self) -> tuple[int, ...]:
        """Elements of a block's matrices in the order of its forward pass: query, key, value, output, gate, up, down."""
        c, kv, h = self.shape.width, self.kv_width, self.shape.hidden
        return c * c, c * kv, c * kv, c * c, c * h, c * h, h * c

    @property
    def block_parameters(self) -> int:
        return sum(self.block_matrices) + 2 * self.shape.width

    @property
    def outer_parameters(self) -> int:
        """Embedding, output layer and last norm, which belong to no block."""
        return self.parameters - self.shape.layers * self.block_parameters

    @property
    def table_parameters(self) -> int:
        """Of these the embedding's where it is a unit of its own, 0 where the output layer uses its weights."""
        return 0 if self.shape.tied else self.shape.vocab_size * self.shape.width

    @property
    def kv_width(self) -> int:
        return self.shape.kv_heads * self.shape.head_dim

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the format that forward and backward compute in."""
        return COMPUTE_BYTES[self.precision.mode]

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step over all ranks."""
        return self.global_batch // self.micro_batch

    @property
    def flops_per_token(self) -> float:
        """Operations of forward and backward for each token, without recomputation."""
        return llama.flops_per_token(self.shape, self.seq_len)

    @property
    def checkpoint_bytes(self) -> int:
        return STATE_BYTES * self.parameters
