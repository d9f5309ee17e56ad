"""A rank's chunk of a DTensor is where its content says, also on meshes where torch's own offsets are wrong."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.trainer.ranks import run_ranks
from trainer import parallel
from trainer.parallel.shards import Axis, chunk_of, local_shard

PLAN = {"up": ColwiseParallel(), "norm": SequenceParallel(), "down": RowwiseParallel()}
ROWS = (97, 50, 13, 7, 5, 1)


def layer(rows: int) -> nn.Module:
    parts = {"up": nn.Linear(4, rows), "norm": nn.RMSNorm(rows), "down": nn.Linear(rows, rows, bias=False)}
    model = nn.Sequential(OrderedDict(parts))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape))
    return model


def held(world: parallel.World, sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Every parameter's chunk on this rank: its box, its replica, and whether the content is what the whole has there."""
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    axes = [Axis(name, mesh.size(at), mesh.get_local_rank(name)) for at, name in enumerate(names)]
    rows = []
    for count in ROWS:
        model, whole = layer(count), dict(layer(count).named_parameters())
        if sizes[2] > 1:
            parallelize_module(model, mesh["tensor"], PLAN)
        fully_shard(model, mesh=mesh["shard"] if sizes[0] == 1 else mesh["replicate", "shard"])
        for name, parameter in model.named_parameters():
            shard = local_shard(name, parameter, axes)
            chunk = shard.chunk
            box = tuple(slice(at, at + length) for at, length in zip(chunk.offsets, chunk.lengths, strict=True))
            rows.append(
                {
                    "name": f"{count}.{name}",
                    "same": torch.equal(shard.tensor, whole[name][box]),
                    "shape": chunk.tensor.shape,
                    "box": (chunk.offsets, chunk.lengths),
                    "replica": (chunk.replica, chunk.replicas),
                }
            )
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 3, 2), (1, 4, 2), (2, 3, 1), (2, 2, 2)], ids=str)
def test_chunks_hold_their_content_and_cover_each_replica_once(
    fork_server: ForkServer, sizes: tuple[int, int, int]
) -> None:
    ranks = run_ranks(fork_server, prod(sizes), held, sizes)
    for rows in zip(*ranks, strict=True):
        name, shape = rows[0]["name"], rows[0]["shape"]
        assert all(row["same"] for row in rows), name
        replicas = rows[0]["replica"][1]
        held_by: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for row in rows:
            offsets, lengths = row["box"]
            cells = product(*(range(at, at + length) for at, length in zip(offsets, lengths, strict=True)))
            held_by.update((row["replica"][0], cell) for cell in cells)
        assert held_by == Counter(product(range(replicas), product(*map(range, shape)))), name


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 5, 8, 97])
def test_one_cut_is_what_torch_chunk_makes(rows: int, parts: int) -> None:
    pieces = torch.arange(rows).chunk(parts) if rows else ()
    for number in range(parts):
        offsets, lengths = chunk_of((rows,), [(0, parts, number)])
        expected = pieces[number].tolist() if number < len(pieces) else []
        assert list(range(offsets[0], offsets[0] + lengths[0])) == expected


def test_second_cut_divides_what_the_first_left() -> None:
    assert chunk_of((97, 8), [(0, 2, 1), (0, 3, 2)]) == ((81, 0), (16, 8))
    assert chunk_of((97, 8), [(0, 2, 0), (1, 3, 2)]) == ((0, 6), (49, 2))


def test_plain_tensor_is_held_by_every_rank() -> None:
    mesh = [Axis("replicate", 2, 1), Axis("shard", 3, 2)]
    chunk = local_shard("step", torch.ones(5, 2), mesh).chunk
    assert (chunk.offsets, chunk.lengths, chunk.replica_axes) == ((0, 0), (5, 2), ("replicate", "shard"))
    assert (chunk.replica, chunk.replicas) == (5, 6)


def refused(world: parallel.World, kind: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    tensor: Tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    if kind == "partial":
        tensor = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
    axes = [Axis("other" if kind == "axis" else "shard", 4 if kind == "size" else 2, world.rank)]
    try:
        local_shard("weight", tensor, axes)
    except UserError as error:
        return error.problems[0].path
    return ""


@pytest.mark.slow
def test_what_is_no_chunk_of_the_mesh_is_refused(fork_server: ForkServer) -> None:
    for kind in ("partial", "axis", "size"):
        assert run_ranks(fork_server, 2, refused, kind) == ["weight", "weight"], kind
