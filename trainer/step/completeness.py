"""Proof that what is saved is the whole training: every entry of the state_dict and every trained parameter's state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from lustrain.problem import UserError, problem
from trainer.parallel.shards import is_sharded


def tie_key(tensor: Tensor) -> Hashable:
    """Return a key that only tied tensors share: where their elements lie, and how these are read.

    A tensor without elements has no place in memory and is tied to nothing. Shards are tied where they are the same object:
    a rank may hold no element of one.
    """
    if is_sharded(tensor):
        return id(tensor)
    if not tensor.numel():
        return object()
    read_as = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), *read_as)


def require_model_saved(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """UserError unless each entry of the state_dict and each parameter is in `saved`, by name or as a tie of what is."""
    places = {tie_key(tensor) for tensor in saved.values()}
    lost = [
        f"model/{name}"
        for name, value in model.state_dict(keep_vars=True).items()
        if f"model/{name}" not in saved and not (isinstance(value, Tensor) and tie_key(value) in places)
    ]
    # Wrappers may call a parameter otherwise than its entry in the state_dict.
    lost += [
        f"model/{name}" for name, value in model.named_parameters() if value.numel() and tie_key(value) not in places
    ]
    if lost:
        why = "would be missing in every checkpoint: it is no tensor, or the model's state_dict leaves it out"
        fix = "keep it as a parameter or a buffer of the model"
        raise UserError([f"{name}: {why}; fix: {fix}" for name in dict.fromkeys(lost)])


def require_state_saved(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """UserError unless all of the optimizer's state is in `saved`, and each trained parameter has the state of its group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {id(tensor) for tensor in saved.values()}
    lines: list[str] = []
    optimized: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        parameters: list[Tensor] = group["params"]
        optimized.update(map(id, parameters))
        keys = dict.fromkeys(key for parameter in parameters for key in optimizer.state.get(parameter, {}))
        for place, parameter in enumerate(parameters):
            if (name := names.get(id(parameter))) is None:
                where, kind = f"optimizer.param_groups[{number}].params[{place}]", list(parameter.shape)
                fix = "make the optimizer after everything that replaces parameters"
                lines.append(problem(where, kind, "is no parameter of the model", fix=fix))
                continue
            state = optimizer.state.get(parameter, {})
            if not (state or parameter.requires_grad):
                continue
            lost = [f"optim/{name}/{key}" for key in keys if id(state.get(key)) not in kept]
            if not keys:
                lost.append(f"optim/{name}")
            lines += [f"{key}: would be missing in every checkpoint; fix: allocate_state(optimizer)" for key in lost]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in optimized:
            fix = "give it to the optimizer, or set requires_grad to False"
            lines.append(f"optim/{name}: the optimizer does not train this parameter; fix: {fix}")
    if lines:
        raise UserError(lines)
