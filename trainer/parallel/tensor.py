"""Tensor parallelism: ranks that compute each micro-batch together, and split every matrix product by the Task's plan.

The plan comes before recomputation, compilation and sharding. FSDP2 then cuts what it left of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lustrain.problem import UserError, problem
from trainer.parallel.shards import is_sharded


def split_model(model: nn.Module, plan: Mapping[str, ParallelStyle] | None, mesh: DeviceMesh) -> None:
    """Split the model's layers over the ranks of `mesh`, in place; the model may be without weights.

    UserError where there is no plan, where it leaves a parameter out, or gives two tied layers a parameter each.
    """
    if plan is None:
        why, fix = "the Task has no tensor_plan for this model", "parallel.shard, or another Task"
        raise UserError(problem("parallel.tensor", mesh.size(), why, allowed="1", fix=fix))
    ties = tied_names(model)
    # All ranks have the same weights already, so none has to send them.
    parallelize_module(model, mesh, dict(plan), src_data_rank=None)
    lines = []
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            # It would lie on another mesh than the rest, where a norm over both raises (https://github.com/pytorch/pytorch/issues/180346).
            why, fix = "has no style in Task.tensor_plan", "add its module, with SequenceParallel where it stays whole"
            lines.append(problem("parallel.tensor", name, why, fix=fix))
    for names in ties - tied_names(model):
        why = "would no longer be tied: each of its modules would get a parameter of its own"
        fix = "use the one module's weight in both places, or train without parallel.tensor"
        lines.append(problem("parallel.tensor", ", ".join(names), why, fix=fix))
    if lines:
        raise UserError(lines)


def tied_names(model: nn.Module) -> set[tuple[str, ...]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(group) for group in names.values() if len(group) > 1}
