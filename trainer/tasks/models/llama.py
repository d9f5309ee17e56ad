"""A Llama-style decoder: RMSNorm, rotary embedding, SwiGLU, grouped-query attention (https://arxiv.org/abs/2302.13971).

Shapes in comments: B samples, T tokens, C width, H query heads, K key/value heads, D = C / H, V vocabulary.
Linear layers have no bias. The rotation is Hugging Face's (first half with second half): exported weights need no permutation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lustrain.problem import Problem, problem
from trainer.parallel.shards import is_sharded
from trainer.tasks.models.init import fill_normal

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class LlamaShape:
    """All that decides the function the model computes, but its weights.

    The default of a field that is added later has to be what models without it computed: earlier runs count as having it.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    """Width inside the feed-forward part."""
    vocab_size: int = 0
    tied: bool = True
    """The output layer uses the embedding's weights."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


PRESETS = {
    # About 1.9 M parameters with a vocabulary of 8192: a step takes a fraction of a second on two CPU cores.
    "tiny": LlamaShape(width=128, layers=4, heads=4, kv_heads=2, hidden=384),
    # GPT-2 small's depth and width; hidden = 8/3 x width gives three SwiGLU matrices the size of its two GELU ones.
    "llama-124m": LlamaShape(width=768, layers=12, heads=12, kv_heads=12, hidden=2048),
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json, without its rope_scaling
    "1b": LlamaShape(width=2048, layers=16, heads=32, kv_heads=8, hidden=8192, rope_theta=500_000.0),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
    "8b": LlamaShape(width=4096, layers=32, heads=32, kv_heads=8, hidden=14336, tied=False, rope_theta=500_000.0),
}
"""Shapes by name; the vocabulary comes from the data."""

INIT_STD = 0.02
"""Standard deviation of every matrix: GPT-2's (https://github.com/openai/gpt-2/blob/master/src/model.py)."""


def shape_problems(shape: LlamaShape, prefix: str) -> Sequence[str]:
    """Return one line for each thing that makes a shape impossible; [] when the model can be built."""
    lines = []
    if shape.width % shape.heads:
        near = [h for h in range(1, shape.width + 1) if shape.width % h == 0]
        fix = f"{prefix}.heads = {min(near, key=lambda h: abs(h - shape.heads))}, or another width"
        lines.append(
            problem(
                f"{prefix}.heads",
                shape.heads,
                f"does not divide width = {shape.width}",
                allowed="a divisor of width",
                fix=fix,
            )
        )
    elif shape.head_dim % 2:
        why = (
            f"leaves {shape.head_dim} dimensions per head (width = {shape.width}); rotary embedding turns them in pairs"
        )
        lines.append(
            problem(f"{prefix}.heads", shape.heads, why, allowed="width / heads even", fix="choose fewer heads")
        )
    if shape.heads % shape.kv_heads:
        lines.append(
            problem(
                f"{prefix}.kv_heads",
                shape.kv_heads,
                f"does not divide heads = {shape.heads}",
                allowed="a divisor of heads",
                fix=f"{prefix}.kv_heads = {math.gcd(shape.heads, shape.kv_heads)}",
            )
        )
    return lines


def rope_tables(head_dim: int, length: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, head_dim] in fp32 of rotary embedding (https://arxiv.org/abs/2104.09864), both halves alike."""
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, H, T, D] by its position: pair i is (x[i], x[i + D/2]); computed in fp32, returned in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def fused_kernel_takes_groups(device: str, dtype: torch.dtype, head_dim: int, cuda_major: int) -> bool:
    """Whether a kernel without the T x T matrix takes fewer key/value heads than query heads; `cuda_major` 0: no CUDA.

    On CUDA only flash attention does, in half precision, with compute capability 8.0 and heads of at most 256. Otherwise
    scaled_dot_product_attention silently falls back to its math kernel, though the memory-efficient one takes repeated
    heads: https://github.com/pytorch/pytorch/pull/181528, https://github.com/huggingface/transformers/issues/48633.
    """
    return device != "cuda" or (dtype in (torch.float16, torch.bfloat16) and cuda_major >= 8 and head_dim <= 256)


def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Causal attention of query [B, H, T, D] over key and value [B, K, T, D], of which each serves H / K query heads."""
    queries_per_head = query.shape[1] // key.shape[1]
    if queries_per_head > 1:
        major = torch.cuda.get_device_properties(query.device).major if query.is_cuda else 0
        if not fused_kernel_takes_groups(query.device.type, query.dtype, query.shape[-1], major):
            key, value = (heads.repeat_interleave(queries_per_head, dim=1) for heads in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, dropout_p=dropout, enable_gqa=key.shape[1] != query.shape[1]
    )


class Attention(nn.Module):
    """Causal self-attention in which H / K query heads share one key/value head (https://arxiv.org/abs/2305.13245)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.dropout = shape.dropout
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.query(x).view(heads).transpose(1, 2), cos, sin)  # [B, H, T, D]
        key = rotate(self.key(x).view(heads).transpose(1, 2), cos, sin)  # [B, K, T, D]
        value = self.value(x).view(heads).transpose(1, 2)
        mixed = attend(query, key, value, self.dropout if self.training else 0.0)
        # Not reshape(x.shape): a tensor rank has some of the heads only.
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy of the residual stream and added to it."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class Llama(nn.Module):
    """The decoder: logits for tokens, or with targets their summed cross-entropy.

    The loss is part of `forward` so that everything with parameters happens inside the call that DistributedDataParallel wraps.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape, *, length: int, loss_chunk: int = 0) -> None:
        """`length` is the longest sequence; `loss_chunk` tokens at a time get their logits (0: all), recomputed in backward."""
        super().__init__()
        self.shape = shape
        self.length = length
        self.loss_chunk = loss_chunk
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.head = None if shape.tied else nn.Linear(shape.width, shape.vocab_size, bias=False)
        cos, sin = rope_tables(shape.head_dim, length, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens [B, T] int64 to logits [B, T, V]; with targets [B, T] to the fp32 scalar sum of the losses."""
        x = self.dropout(self.embed(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        x = on_every_rank(self.norm(x))
        if targets is None:
            return self.logits(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        if not self.loss_chunk or len(targets) <= self.loss_chunk:
            return self.summed_loss(x, targets)
        chunks = zip(torch.split(x, self.loss_chunk), torch.split(targets, self.loss_chunk), strict=True)
        # Without this, fp32 log-probabilities [B x T, V] live until backward: 2 GB for 4096 tokens of a 128 k vocabulary.
        losses = [checkpoint(self.summed_loss, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks]
        return torch.stack(losses).sum()

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight if self.head is None else self.head.weight)

    def summed_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x).float(), targets, reduction="sum")
        # A clone, because FSDP2 warns of a forward that returns a view, as full_tensor() is.
        return loss.full_tensor().clone() if is_sharded(loss) else loss

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill weights from the seed alone, and tables; what writes the residual stream starts smaller by 1/sqrt(2 x layers).

        Source: GPT-2 section 2.3 (https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf).
        """
        residual_std = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            writes_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            fill_normal(name, parameter, std=residual_std if writes_residual else INIT_STD, seed=seed)
        cos, sin = rope_tables(self.shape.head_dim, self.length, self.shape.rope_theta)
        self.cos.copy_(cos)
        self.sin.copy_(sin)


def on_every_rank(x: Tensor) -> Tensor:
    """Return x whole on each tensor rank; x itself where it is."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def embeddings(model: Llama) -> list[nn.Module]:
    """Return the embedding where the output layer has weights of its own."""
    return [] if model.shape.tied else [model.embed]


def tensor_plan(model: Llama) -> dict[str, ParallelStyle]:
    """Split a model over tensor ranks: attention by heads, feed-forward by its hidden width, the rest by position and token.

    Between the products each rank has T / ranks positions, so that norms and what backward needs of the residual stream are
    split too (sequence parallelism, https://arxiv.org/abs/2205.05198); of the logits it has V / ranks tokens.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    positions, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=positions),
        "norm": SequenceParallel(),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(positions, None, None), desired_input_layouts=(whole, None, None)
        ),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=positions),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=positions, desired_input_layouts=whole),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=positions),
    }
    split = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    plan |= {f"blocks.*.{name}": ColwiseParallel() for name in split}
    return plan if model.head is None else plan | {"head": ColwiseParallel()}


def tensor_problems(shape: LlamaShape, tensor: int, *, length: int, prefix: str) -> list[Problem]:
    """Return one line for each thing that `tensor_plan` cannot split over so many ranks; `prefix` is that of the Task."""
    lines = []
    for path, value in (
        ("seq_len", length),
        ("model.heads", shape.heads),
        ("model.kv_heads", shape.kv_heads),
        ("model.hidden", shape.hidden),
    ):
        if value % tensor:
            why, fix = f"is not a multiple of parallel.tensor = {tensor}", "another value of one of the two"
            lines.append(problem(f"{prefix}.{path}", value, why, allowed=f"multiples of {tensor}", fix=fix))
    if shape.dropout:
        # Tensor ranks have the same seed and other positions: each position's mask would not be one of its own.
        why = f"would drop the same places of what the parallel.tensor = {tensor} ranks hold"
        lines.append(problem(f"{prefix}.model.dropout", shape.dropout, why, allowed="0", fix="leave one of them out"))
    return lines


def empty(shape: LlamaShape, *, length: int, loss_chunk: int = 0) -> Llama:
    """Make the model without weights, on torch's meta device."""
    with torch.device("meta"):
        return Llama(shape, length=length, loss_chunk=loss_chunk)


def build(shape: LlamaShape, *, length: int, seed: int, loss_chunk: int = 0) -> Llama:
    """Build the model on the CPU in fp32 from shape and seed alone; torch's global generator is not touched."""
    model = empty(shape, length=length, loss_chunk=loss_chunk)
    model.to_empty(device="cpu")
    model.initialise(seed)
    return model


def parameters(shape: LlamaShape) -> int:
    """How many numbers are trained, without making the model."""
    c = shape.width
    attention = 2 * c * c + 2 * c * shape.kv_heads * shape.head_dim
    outside = shape.vocab_size * c * (1 if shape.tied else 2) + c
    return shape.layers * (attention + 3 * c * shape.hidden + 2 * c) + outside


def flops_per_token(shape: LlamaShape, length: int) -> float:
    """Forward and backward FLOPs of one token: 6 N + 12 L C T (PaLM appendix B, https://arxiv.org/abs/2204.02311).

    N counts the matrices that multiply: the embedding look-up does not, the output layer does also when tied. As in the paper
    attention counts in full although the causal half is never needed.
    """
    c, d = shape.width, shape.head_dim
    attention = 2 * c * c + 2 * c * shape.kv_heads * d
    multiplying = shape.layers * (attention + 3 * c * shape.hidden) + c * shape.vocab_size
    return 6.0 * multiplying + 12.0 * shape.layers * c * length


_HF_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_HF_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def huggingface_names(model: Llama) -> dict[str, str]:
    """Our parameter names to those of transformers' LlamaForCausalLM; the tensors themselves are the same."""
    names = {}
    for ours, _ in model.named_parameters():
        if ours in _HF_TOP:
            names[ours] = _HF_TOP[ours]
        else:
            _, layer, *part, leaf = ours.split(".")
            names[ours] = f"model.layers.{layer}.{_HF_BLOCK['.'.join(part)]}.{leaf}"
    return names


def huggingface_config(model: Llama) -> dict[str, Any]:
    """Return the `config.json` with which transformers' LlamaForCausalLM reads the exported weights."""
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": model.length,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
