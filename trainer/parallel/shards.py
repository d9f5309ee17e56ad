"""The chunk of a tensor that this rank holds, and which ranks hold the same: for any mix of DDP, FSDP2 and tensor parallelism.

torch's own offsets (`compute_local_shape_and_global_offset`) are not used. With three shards or more and tensor parallelism
they are wrong where rows do not divide, as GPT-2's 50,257 tokens on 4 x 2 (https://github.com/pytorch/pytorch/issues/161368).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class Axis:
    """One dimension of the job's device mesh, and this rank's place along it."""

    name: str
    size: int
    coordinate: int


@dataclass(frozen=True)
class LocalShard:
    """This rank's chunk of one tensor: `tensor` holds the elements from `offsets` on, of a tensor of global `shape`.

    The ranks that differ in their place along `replica_axes` only hold the same chunk; `replica` counts them, of `replicas`.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    replica_axes: tuple[str, ...]
    replica: int
    replicas: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def local_shard(name: str, tensor: Tensor, mesh: Sequence[Axis]) -> LocalShard:
    """Describe this rank's chunk of a tensor; a plain tensor is one chunk that all ranks of `mesh` hold.

    `mesh` is the whole job's: a DTensor on a part of it has replicas along the axes that its own mesh lacks. ValueError for a
    placement that is no chunk (a partial sum), a mesh of other axes, or a local tensor of another size than its placement says.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return _shard(name, tensor, shape, (0,) * len(shape), mesh)
    by_name = {axis.name: axis for axis in mesh}
    own_axes = tuple(tensor.device_mesh.mesh_dim_names or ())
    sizes = tuple(tensor.device_mesh.shape)
    known = tuple(by_name[axis].size for axis in own_axes if axis in by_name)
    if not own_axes or known != sizes:
        raise ValueError(f"{name}: its mesh {own_axes} of {sizes} is not a part of the job's {[*by_name]}")
    placed = list(zip((by_name[axis] for axis in own_axes), tensor.placements, strict=True))
    offsets, lengths = chunk_of(tuple(tensor.shape), _cuts(name, placed))
    local = tensor.to_local()
    if local.numel() == 0 and 0 in lengths:
        local = local.reshape(lengths)
    if tuple(local.shape) != lengths:
        raise ValueError(f"{name}: holds {list(local.shape)} where {list(tensor.placements)} leave {list(lengths)}")
    cut = {axis.name for axis, placement in placed if not isinstance(placement, Replicate)}
    return _shard(name, local, tuple(tensor.shape), offsets, [axis for axis in mesh if axis.name not in cut])


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


def _cuts(name: str, placed: Sequence[tuple[Axis, Placement]]) -> list[tuple[int, int, int]]:
    """Order the cuts as they were made: FSDP2 cuts what tensor parallelism left, and marks that by a strided placement."""
    first, then = [], []
    for axis, placement in placed:
        if isinstance(placement, _StridedShard):
            then.append((placement.dim, axis.size, axis.coordinate))
        elif isinstance(placement, Shard):
            first.append((placement.dim, axis.size, axis.coordinate))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{name}: {placement} along {axis.name} is not a chunk of a tensor")
    return first + then


def _shard(
    name: str, tensor: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], replicated: Sequence[Axis]
) -> LocalShard:
    replica, replicas = 0, 1
    for axis in replicated:
        replica, replicas = replica * axis.size + axis.coordinate, replicas * axis.size
    return LocalShard(name, tensor, shape, offsets, tuple(axis.name for axis in replicated), replica, replicas)
