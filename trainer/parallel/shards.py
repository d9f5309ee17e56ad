"""The chunk of a tensor that this rank holds, and which ranks hold the same: for any mix of DDP, FSDP2 and tensor parallelism.

torch's own offsets (`compute_local_shape_and_global_offset`) are not used. With three shards or more and tensor parallelism
they are wrong where rows do not divide, as GPT-2's 50,257 tokens on 4 x 2 (https://github.com/pytorch/pytorch/issues/161368).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from lustrain.problem import UserError, problem
from trainer.chunk import HeldChunk, TensorMeta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Axis:
    """One dimension of the job's device mesh, and this rank's place along it."""

    name: str
    size: int
    coordinate: int


@dataclass(frozen=True)
class LocalShard:
    """A chunk that this rank holds, and its elements, in the memory that training uses."""

    chunk: HeldChunk
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.chunk.tensor.name


def local_shard(name: str, tensor: Tensor, mesh: Sequence[Axis]) -> LocalShard:
    """Describe this rank's chunk of a tensor; a plain tensor is one chunk that all ranks of `mesh` hold.

    `mesh` is the whole job's: a DTensor on a part of it has replicas along the axes that its own mesh lacks. UserError for a
    placement that is no chunk (a partial sum), a mesh of other axes, or a local tensor of another size than its placement says.
    """
    local, offsets = local_chunk(name, tensor)
    whole_on = list(mesh)
    cuts: tuple[tuple[int, str], ...] = ()
    if is_sharded(tensor):
        own = _axes(tensor.device_mesh)
        if not set(own) <= set(mesh):
            raise UserError(problem(name, _shown(own), "is not a part of the job's mesh", allowed=_shown(mesh)))
        cuts = tuple((dim, axis.name) for dim, axis in _cuts(name, tensor))
        whole_on = [axis for axis in mesh if axis.name not in {name for _, name in cuts}]
    replica, replicas = 0, 1
    for axis in whole_on:
        replica, replicas = replica * axis.size + axis.coordinate, replicas * axis.size
    names = tuple(axis.name for axis in whole_on)
    meta = TensorMeta(name, dtype_name(local), tuple(tensor.shape), local.element_size())
    return LocalShard(HeldChunk(meta, offsets, tuple(local.shape), names, replica, replicas, cuts), local)


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of a tensor's dtype, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def local_chunk(name: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the plain tensor that this rank holds of `tensor`, sharing its memory, and where that begins in the whole.

    UserError as `local_shard`.
    """
    if not is_sharded(tensor):
        return tensor, (0,) * tensor.dim()
    cuts = [(dim, axis.size, axis.coordinate) for dim, axis in _cuts(name, tensor)]
    offsets, lengths = chunk_of(tuple(tensor.shape), cuts)
    local = tensor.to_local()
    if local.numel() == 0 and 0 in lengths:
        local = local.reshape(lengths)
    if tuple(local.shape) != lengths:
        why = f"the rank holds {list(local.shape)} of it where this leaves {list(lengths)}: a defect"
        raise UserError(problem(name, list(tensor.placements), why, fix="report it"))
    return local, offsets


def chunk_of(shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and lengths of what is left after cutting; each cut is (dimension, parts, which part), of what is left.

    Parts have ceil(length / parts) elements, the last ones fewer or none, as torch.chunk makes them.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for dim, parts, number in cuts:
        length = -(-lengths[dim] // parts)
        begin = min(number * length, lengths[dim])
        offsets[dim] += begin
        lengths[dim] = min(length, lengths[dim] - begin)
    return tuple(offsets), tuple(lengths)


def rank_at(mesh: Sequence[Axis]) -> int:
    """Return the rank at this place of the job's mesh, whose last axis counts fastest."""
    rank = 0
    for axis in mesh:
        rank = rank * axis.size + axis.coordinate
    return rank


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this is a DTensor, which may hold a part of a tensor only."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        return False
    # This import takes half a second, which a process with plain tensors need not spend.
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def require_dense(name: str, tensor: Tensor) -> None:
    """UserError, one line that begins with `name`, for what has no bytes of its own: sparse tensors, meta tensors."""
    dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    if not dense or (tensor.numel() and not tensor.data_ptr()):
        kind = f"{type(tensor).__name__}, {tensor.layout} on {tensor.device}"
        raise UserError(problem(name, kind, "has no bytes of its own to save", allowed="dense tensors with data"))


def _cuts(name: str, tensor: DTensor) -> list[tuple[int, Axis]]:
    """Order the cuts as they were made: FSDP2 cuts what tensor parallelism left, and marks that by a strided placement."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    first, then = [], []
    for axis, placement in zip(_axes(tensor.device_mesh), tensor.placements, strict=True):
        if isinstance(placement, _StridedShard):
            then.append((placement.dim, axis))
        elif isinstance(placement, Shard):
            first.append((placement.dim, axis))
        elif not isinstance(placement, Replicate):
            why = f"along {axis.name} is not a chunk of a tensor"
            raise UserError(problem(name, placement, why, allowed="Shard, Replicate", fix="redistribute it"))
    return first + then


def _shown(mesh: Sequence[Axis]) -> str:
    return " x ".join(f"{axis.name} {axis.size}" for axis in mesh)


def _axes(mesh: DeviceMesh) -> tuple[Axis, ...]:
    names = mesh.mesh_dim_names or tuple(f"dim {at}" for at in range(mesh.ndim))
    return tuple(Axis(name, mesh.size(at), mesh.get_local_rank(at)) for at, name in enumerate(names))
