"""FSDP2: each rank holds a shard of every parameter, gradient and optimizer state; a unit is whole only while it computes.

The order is fixed: the tensor plan, recomputation and compilation, then sharding, then weights, then the optimizer. An
optimizer that is made before sharding trains nothing, and raises no error.

Which unit is gathered next is left to FSDP2. torchtitan names it only for expert parallelism, whose waits for the GPU disturb
that (https://github.com/pytorch/torchtitan/blob/2645c02d392641f6f78c43dbc20f27e3f0849182/torchtitan/models/llama4/infra/parallelize.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from lustrain.problem import Problem, UserError, problem
from trainer.config import ParallelConfig, PrecisionConfig
from trainer.parallel.ddp import refuse_batch_statistics
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.strategy import ModelSource, makes_empty_models
from trainer.parallel.tensor import split_model
from trainer.parallel.world import World


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
        embeddings = list(source.embeddings(model))
        if lines := unit_problems(model, [*blocks, *embeddings]):
            raise UserError(lines)
        empty = any(parameter.is_meta for parameter in model.parameters())
        policy = mixed_precision(self._precision)
        self._model = shard_units(
            model,
            blocks,
            embeddings,
            mesh=self._data_mesh(),
            policy=policy,
            reshard=self._config.reshard,
            offload=offload_policy(self._config, self._world.device),
        )
        if empty:
            on_host = self._config.states_on_host
            model.to_empty(device=torch.device("cpu") if on_host else self._world.device)
            source.initialise(model)
            if on_host:
                move_buffers(model, self._world.device)
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


def shard_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    embeddings: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None,
    policy: MixedPrecisionPolicy,
    reshard: bool,
    offload: OffloadPolicy | None = None,
) -> FSDPModule:
    """Shard a model in place, each block and each embedding as a unit of its own; `unit_problems` has nothing to say of it."""
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload or OffloadPolicy())
    for embedding in embeddings:
        # What it looks up does not depend on its weights: backward would gather them in vain.
        shard(embedding, reshard_after_forward=reshard).set_unshard_in_backward(False)
    for block in blocks:
        shard(block, reshard_after_forward=reshard)
    # The output layer is needed first in backward; what else lies outside of units stays gathered with it.
    return shard(model, reshard_after_forward=False)


def offload_policy(config: ParallelConfig, device: torch.device) -> OffloadPolicy:
    """Return where shards lie between their uses; host memory is page-locked, so that a GPU copies while it computes."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.states_on_host else OffloadPolicy()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers, which FSDP2 does not gather, to where forward passes compute."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def unit_problems(model: nn.Module, units: Sequence[nn.Module]) -> list[Problem]:
    """Return one line for each parameter that FSDP2 cannot shard: without dimensions, in two units, of another dtype.

    What lies in none of `units` is one more.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = {id(module) for unit in units for module in unit.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    held = [list(unit.parameters()) for unit in units]
    held.append([parameter for module in outside for parameter in module.parameters(recurse=False)])
    unit_of: dict[int, int] = {}
    lines: list[Problem] = []
    for number, parameters in enumerate(held):
        for parameter in parameters:
            if unit_of.setdefault(id(parameter), number) != number:
                why = "is used in a block or an embedding and outside of it"
                fix = "leave that out of Task.blocks or Task.embeddings, or train without shards"
                lines.append(problem("parallel.shard", names[id(parameter)], why, fix=fix))
    dtypes: dict[int, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            why, fix = "has no dimension to shard", "give the parameter the shape [1]"
            lines.append(problem("parallel.shard", name, why, fix=fix))
        unit = unit_of[id(parameter)]
        if dtypes.setdefault(unit, parameter.dtype) != parameter.dtype:
            why = f"is {parameter.dtype} in a block of {dtypes[unit]}"
            lines.append(problem("parallel.shard", name, why, fix="give all parameters of a block one dtype"))
    return lines


def mixed_precision(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """Gather weights in the format that is computed with, and reduce gradients in fp32; inputs stay as autocast leaves them."""
    dtype = None if config.mode == "fp32" else getattr(torch, config.dtype)
    reduce = None if dtype is None else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)
