"""FSDP2: each rank holds a shard of every parameter, gradient and optimizer state; a unit is whole only while it computes.

The order is fixed: the tensor plan, recomputation and compilation, then sharding, then weights, then the optimizer. An
optimizer that is made before sharding trains nothing, and raises no error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from lustrain.problem import Problem, UserError, problem
from trainer.config import ParallelConfig, PrecisionConfig
from trainer.parallel.ddp import refuse_batch_statistics
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.strategy import ModelSource, makes_empty_models
from trainer.parallel.tensor import split_model
from trainer.parallel.world import World

GATHERED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sharded:
    """FSDP2, or HSDP where there are several replicas, of a model whose layers may be split over tensor ranks before.

    With tensor ranks it also averages the gradients of a model that has one shard: DDP does not know such parameters.
    """

    def __init__(self, config: ParallelConfig, precision: PrecisionConfig, world: World, dims: ParallelDims) -> None:
        self.dims = dims
        self._config, self._precision, self._world = config, precision, world
        self._mesh = dims.device_mesh(world.device)
        self._model: FSDPModule | None = None

    def build(self, source: ModelSource) -> nn.Module:
        """Return the model without weights where its Task can make it so, else whole, on the CPU; split over tensor ranks.

        UserError as `split_model`.
        """
        empty = source.empty_model() if makes_empty_models(type(source)) else None
        model = source.build_model() if empty is None else empty
        if self.dims.tensor > 1:
            split_model(model, source.tensor_plan(model), self._mesh["tensor"])
        return model

    def wrap(self, model: nn.Module, source: ModelSource) -> nn.Module:
        """Shard the model in place, block by block, and give it its weights; with an `empty_model` no rank holds all of them.

        UserError for what FSDP2 cannot take.
        """
        refuse_batch_statistics(model)
        blocks = [block for block in source.blocks(model) if block is not model]
        if lines := unit_problems(model, blocks):
            raise UserError(lines)
        empty = any(parameter.is_meta for parameter in model.parameters())
        options: dict[str, Any] = {"mesh": self._data_mesh(), "mp_policy": mixed_precision(self._precision)}
        for block in blocks:
            fully_shard(block, reshard_after_forward=self._config.reshard, **options)
        # The output layer is needed first in backward; what else lies outside of blocks stays gathered with it.
        self._model = fully_shard(model, reshard_after_forward=False, **options)
        if empty:
            model.to_empty(device=self._world.device)
            source.initialise(model)
        return model

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients to this rank's shard in every micro-batch, over the replicas in the last one only.

        To keep them whole until the last, as DDP does, would cost each rank the whole model's gradients.
        """
        if self._model is not None and self.dims.replicate > 1:
            self._model.set_requires_all_reduce(last)
        # Each tensor rank has the logits of a part of the classes, which cross_entropy understands in this context only.
        return loss_parallel() if self.dims.tensor > 1 else nullcontext()

    def warm_up(self, run_backward: Callable[[], None]) -> None:
        """Do nothing: FSDP2 exchanges in the same order from the first step on."""

    def _data_mesh(self) -> DeviceMesh:
        """Return the axes along which batches differ: FSDP2 shards and averages over these."""
        if self.dims.tensor == 1:
            return self._mesh
        return self._mesh["shard"] if self.dims.replicate == 1 else self._mesh["replicate", "shard"]


def unit_problems(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Problem]:
    """Return one line for each parameter that FSDP2 cannot shard: without dimensions, in two blocks, of another dtype."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    block_of: dict[int, int] = {}
    lines: list[Problem] = []
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            if block_of.setdefault(id(parameter), number) != number:
                why, fix = "is shared by two blocks", "leave them out of Task.blocks, or train without shards"
                lines.append(problem("parallel.shard", names[id(parameter)], why, fix=fix))
    dtypes: dict[int, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            why, fix = "has no dimension to shard", "give the parameter the shape [1]"
            lines.append(problem("parallel.shard", name, why, fix=fix))
        unit = block_of.get(id(parameter), -1)
        if dtypes.setdefault(unit, parameter.dtype) != parameter.dtype:
            why = f"is {parameter.dtype} in a block of {dtypes[unit]}"
            lines.append(problem("parallel.shard", name, why, fix="give all parameters of a block one dtype"))
    return lines


def mixed_precision(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """Gather weights in the format that is computed with, and reduce gradients in fp32; inputs stay as autocast leaves them."""
    dtype = GATHERED.get(config.mode)
    reduce = None if dtype is None else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)
