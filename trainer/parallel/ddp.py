"""DistributedDataParallel with its real options, and what it leaves to the caller: when to synchronise, and its warm-up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lustrain.problem import UserError, problem
from trainer.config import ParallelConfig
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.strategy import ModelSource
from trainer.parallel.world import World

NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)
"""Buffers are constant tables here, so sending them before each forward would be waste; torch 2.13 renamed the switch."""


def problems(config: ParallelConfig, *, device: torch.device) -> Sequence[str]:
    """Return one line for each option that DDP refuses on this device."""
    if config.comm_hook != "bf16" or device.type != "cpu":
        return ()
    why = "torch sums bf16 gradients with NCCL or XCCL only, not between CPUs"
    return [problem("parallel.comm_hook", "bf16", why, allowed="none, fp16", fix="another hook, or a GPU")]


class Replicated:
    """The whole model on every rank, its gradients averaged by DDP; the model itself where there is one rank."""

    def __init__(self, config: ParallelConfig, world: World, dims: ParallelDims) -> None:
        self.dims = dims
        self._config, self._world = config, world
        self._wrapped: nn.Module | None = None

    def build(self, source: ModelSource) -> nn.Module:
        return source.build_model().to(self._world.device)

    def wrap(self, model: nn.Module, source: ModelSource) -> nn.Module:
        self._wrapped = wrap_ddp(model, self._config, self._world)
        return self._wrapped

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._wrapped is None else accumulate(self._wrapped, last=last)

    def warm_up(self, run_backward: Callable[[], None]) -> None:
        if self._wrapped is not None:
            warm_up_buckets(self._wrapped, run_backward)


def wrap_ddp(model: nn.Module, config: ParallelConfig, world: World) -> nn.Module:
    """Return the model with its gradients averaged over the ranks; the model itself when there is one rank.

    Rank 0's weights are sent to all. Buffers are not synchronised, so a model whose buffers learn from the batch is refused.
    """
    if world.world_size == 1:
        return model
    refuse_batch_statistics(model)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        **NO_BUFFER_SYNC,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
    )
    if config.comm_hook != "none":
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        wrapped.register_comm_hook(None, hooks[config.comm_hook])
    return wrapped


def refuse_batch_statistics(model: nn.Module) -> None:
    """UserError for a model whose buffers learn from the batch: ranks would not have the same ones."""
    learning = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if learning:
        why = "batch normalisation's statistics depend on how a batch is split over ranks"
        raise UserError(problem("task.name", learning[0], why, fix="use a model with group or layer normalisation"))


def accumulate(wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return the context of a micro-batch's forward and backward: gradients are exchanged in the last one only."""
    if last or not isinstance(wrapped, DistributedDataParallel):
        return nullcontext()
    return wrapped.no_sync()


def warm_up_buckets(wrapped: nn.Module, run_backward: Callable[[], None]) -> None:
    """Let DDP arrange its gradient buckets before the first step that counts; call once, at the start of every attempt.

    DDP orders its buckets anew after the first backward, by when each gradient became ready, and a gradient's place decides in
    which order the ranks' contributions are summed; with three ranks or more that is another rounding. A resumed run would so
    round its first step unlike the uninterrupted run, for which that step is not the first. Also, static_graph cannot begin
    with a backward that skips synchronisation; after this one it can.

    `run_backward` does one forward and backward on any batch, without `accumulate`; its gradients are dropped, buffers and
    random states put back. The new order takes effect at the next forward, whatever batch that has.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    buffers = {name: buffer.clone() for name, buffer in wrapped.module.named_buffers()}
    devices = [wrapped.device] if wrapped.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        run_backward()
    wrapped.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in wrapped.module.named_buffers():
            buffer.copy_(buffers[name])
    dist.barrier(device_ids=[wrapped.device.index] if devices else None)
