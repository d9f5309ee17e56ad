"""Which tensors a rank holds whole, in memory of its own: the only ones that can be saved so far."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lustrain.problem import UserError, problem


def require_whole(name: str, tensor: Tensor) -> None:
    """UserError, one line that begins with `name`, for a shard of a tensor and for one that has no bytes of its own."""
    if _is_sharded(tensor):
        kind = f"DTensor {tensor.placements}"  # type: ignore[attr-defined]
        fix = "train with DDP, or pass full_tensor()"
        raise UserError(problem(name, kind, "shards cannot be saved yet", allowed="whole tensors", fix=fix))
    dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    if not dense or (tensor.numel() and not tensor.data_ptr()):
        kind = f"{type(tensor).__name__}, {tensor.layout} on {tensor.device}"
        raise UserError(problem(name, kind, "has no bytes of its own to save", allowed="dense tensors with data"))


def _is_sharded(tensor: Tensor) -> bool:
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        return False
    # This import takes half a second, which a process with plain tensors need not spend.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
