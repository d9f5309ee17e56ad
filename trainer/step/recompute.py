"""Activation checkpointing and compilation, block by block, without renaming a parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Kind = Literal["none", "selective", "full"]

_SDPA = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
_MATMUL = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def recompute_blocks(blocks: Sequence[nn.Module], kind: Kind) -> None:
    """Let each block drop activations in forward and compute them again in backward.

    `full` keeps only a block's input. `selective` also keeps attention and every second matrix product, which saves most of the
    memory for less than half of the extra work (torchtitan's per-op policy, https://arxiv.org/abs/2410.06511 section 2.1.2).
    The result is the same to the last bit, dropout included.
    """
    if kind == "none":
        return
    for block in blocks:
        block.forward = _recomputed(block.forward, selective=kind == "selective")


def compile_blocks(blocks: Sequence[nn.Module], mode: str) -> None:
    """`torch.compile` each block in place: equal blocks share one compilation, and parameter names stay as they are."""
    for block in blocks:
        block.compile(mode=None if mode == "default" else mode)


def _recomputed(forward: Callable[..., Any], *, selective: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = _selective_contexts

    @functools.wraps(forward)
    def recomputed(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, **options)

    return recomputed


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """One policy per call: forward and recomputation count their matrix products apart and so choose the same ones."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _SDPA:
            return CheckpointPolicy.MUST_SAVE
        if operation in _MATMUL:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts[0], contexts[1]
