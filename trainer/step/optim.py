"""AdamW over named parameters: groups, state tensors by name, and the clip that also normalises.

State is reached by parameter name so that a checkpoint does not depend on the order in which parameters are listed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lustrain.problem import UserError, problem
from trainer.config import OptimizerConfig
from trainer.parallel.shards import is_sharded, local_chunk, require_dense
from trainer.step.completeness import require_model_saved, require_state_saved, tie_key

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FUSED_DEVICES = ("cpu", "cuda", "xpu")
"""Device types for which torch has a fused AdamW kernel that we use (torch.utils._foreach_utils lists them)."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two AdamW groups: matrices (two or more dimensions, embeddings among them) decay; gains and biases do not.

    This is GPT's practice (nanoGPT's configure_optimizers): pulling a normalisation's gain towards 0 only hurts.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW for a model already on its device, with all of its state allocated; UserError when `fused` is impossible."""
    device = next(model.parameters()).device
    fused = device.type in FUSED_DEVICES if config.fused is None else config.fused
    if fused and device.type not in FUSED_DEVICES:
        why = f"torch has no fused AdamW for {device.type}"
        raise UserError(problem("optimizer.fused", True, why, allowed="false", fix="leave it out"))
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=None if fused else True,
    )
    allocate_state(optimizer)
    return optimizer


@torch.no_grad()
def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, all zeros, without changing a parameter.

    A step of zero gradients at rate 0 does it with whatever layout this torch gives the state; so the staging buffers of
    checkpoints get their final size before the first step, and a checkpoint can be loaded in place.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`model/<name>` to each parameter and stored buffer, sharing memory; a tied tensor appears once.

    Tied are the same elements read the same way: a view of a part of another tensor is not. UserError names a tensor that
    cannot be saved (a sparse one), and whatever of the model's state_dict would be missing.
    """
    tensors: dict[str, Tensor] = {}
    places: set[Hashable] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if (place := tie_key(tensor)) not in places:
            places.add(place)
            # detach() would make another DTensor of it, and only the same one is known to be tied.
            tensors[f"model/{name}"] = tensor if is_sharded(tensor) else tensor.detach()
    for name, tensor in tensors.items():
        require_dense(name, local_chunk(name, tensor)[0])
    require_model_saved(model, tensors)
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`optim/<parameter name>/<state name>` to each state tensor (exp_avg, exp_avg_sq, step), sharing memory.

    UserError names a tensor that cannot be saved, and each trained parameter whose state would be missing.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                require_dense(f"optim/{name}/{key}", local_chunk(name, value)[0])
                tensors[f"optim/{name}/{key}"] = value
    require_state_saved(model, optimizer, tensors)
    return tensors


@torch.no_grad()
def clip_(parameters: Sequence[Tensor], max_norm: float, *, scale: float) -> float:
    """Multiply gradients by `scale` and clip the result to the global L2 norm `max_norm`; returns its norm before clipping.

    One pass computes the norm and at most one multiplies, since both factors are joined; a factor of exactly 1 touches nothing.
    `max_norm` 0 only measures. Gradients whose norm is not finite are left as they are, for the caller to reject the step.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return 0.0
    norm = _total_norm(grads) * scale
    if not math.isfinite(norm):
        return norm
    factor = scale * max_norm / norm if 0 < max_norm < norm else scale
    if factor != 1.0:
        torch._foreach_mul_(grads, factor)
    return norm


def _total_norm(grads: Sequence[Tensor]) -> float:
    if is_sharded(grads[0]) and "tensor" in (grads[0].device_mesh.mesh_dim_names or ()):
        return _norm_over_all_ranks([grad for grad in grads if is_sharded(grad)])
    total = get_total_norm(grads)
    # float() of a DTensor is this rank's part, not the norm over all shards.
    return float(total.full_tensor() if is_sharded(total) else total)


def _norm_over_all_ranks(grads: Sequence[DTensor]) -> float:
    """Return the norm of gradients that several axes of the job's mesh cut: one exchange, and so the same bits on all ranks.

    get_total_norm exchanges along one axis after the other. Groups of ranks may then round unlike each other, and what two
    ranks hold alike would be clipped unlike.
    """
    norms = torch.stack(torch._foreach_norm([grad.to_local() for grad in grads])).double()
    replicas = [
        math.prod(
            size for size, placed in zip(grad.device_mesh.shape, grad.placements, strict=True) if placed.is_replicate()
        )
        for grad in grads
    ]
    total = (norms.square() / torch.tensor(replicas, device=norms.device)).sum()
    dist.all_reduce(total)
    return math.sqrt(float(total))
