"""A sharded run is the same training: losses of one rank, bits of its own after a resume, and any mesh goes on from any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.trainer.meshes import MeshRuns, assert_losses_of_one_rank, equal
from tests.trainer.ranks import run_ranks
from trainer import parallel
from trainer.chunk import HeldChunk, TensorMeta
from trainer.config import Config, ParallelConfig, PrecisionConfig
from trainer.generation import held_checksums, require_same_weights
from trainer.parallel import choose, fsdp
from trainer.parallel.mesh import ParallelDims, mesh_problems
from trainer.parallel.shards import Axis, LocalShard
from trainer.tasks.language_model import LanguageModel

CONFIG = Config.model_validate(
    {"run": {"uri": "run"}, "task": {"name": "t"}, "train": {"steps": 1, "global_batch": 2, "micro_batch": 1}}
)


@pytest.mark.slow
def test_sharded_run_has_one_ranks_losses_and_resumes_to_the_bit(fork_server: ForkServer, tmp_path: Path) -> None:
    runs = MeshRuns(fork_server, tmp_path)
    runs.train("one", "one")
    runs.train("whole", "hsdp2x2")
    assert_losses_of_one_rank(runs.steps("whole"), runs.steps("one"))
    runs.train("parts", "hsdp2x2", "train.steps=5")
    runs.train("parts", "hsdp2x2")
    assert runs.steps("parts") == runs.steps("whole")
    assert equal(runs.tensors("parts"), runs.tensors("whole"))


@pytest.mark.parametrize(
    ("shard", "tensor", "ranks", "path", "allowed"),
    [
        (1, 1, 3, None, ""),
        (3, 1, 6, None, ""),
        (0, 1, 5, None, ""),
        (4, 1, 6, "parallel.shard", "0, 1, 2, 3, 6"),
        (8, 1, 6, "parallel.shard", "0, 1, 2, 3, 6"),
        (3, 2, 12, None, ""),
        (0, 2, 6, None, ""),
        (4, 2, 12, "parallel.shard", "0, 1, 2, 3, 6"),
        (1, 4, 6, "parallel.tensor", "1, 2, 3, 6"),
        (1, 8, 6, "parallel.tensor", "1, 2, 3, 6"),
    ],
)
def test_mesh_that_the_ranks_cannot_make_is_named(
    shard: int, tensor: int, ranks: int, path: str | None, allowed: str
) -> None:
    lines = mesh_problems(ParallelConfig(shard=shard, tensor=tensor), ranks)
    assert [(line.path, line.allowed) for line in lines] == ([(path, allowed)] if path else [])


def test_ranks_of_a_replica_are_neighbours() -> None:
    dims = [ParallelDims(replicate=2, shard=3, rank=rank) for rank in range(6)]
    assert [[axis.coordinate for axis in one.axes] for one in dims] == list(map(list, product(range(2), range(3))))
    assert {(one.data_rank, one.data_size) for one in dims} == {(rank, 6) for rank in range(6)}


def test_tensor_ranks_are_nearest_and_share_their_batches() -> None:
    dims = [ParallelDims(replicate=2, shard=3, rank=rank, tensor=2) for rank in range(12)]
    assert [[axis.coordinate for axis in one.axes] for one in dims] == list(map(list, product(*map(range, (2, 3, 2)))))
    assert [one.data_rank for one in dims] == [rank // 2 for rank in range(12)]
    assert {(one.data_size, one.replica_size) for one in dims} == {(6, 6)}


def test_shards_over_all_ranks_leave_tensor_ranks_out() -> None:
    world = parallel.World(5, 12, 0, torch.device("cpu"), torch.distributed.HashStore())
    assert ParallelDims.of(ParallelConfig(shard=0, tensor=4), world) == ParallelDims(1, 3, 5, 4)


def problems_of(config: ParallelConfig, train: dict[str, Any] | None = None) -> Sequence[Any]:
    world = parallel.World(0, 2, 0, torch.device("cpu"), torch.distributed.HashStore())
    changed = {"parallel": config, "train": CONFIG.train.model_copy(update=train or {})}
    return list(choose.problems(CONFIG.model_copy(update=changed), world))


def test_options_of_the_other_strategy_are_refused() -> None:
    config = ParallelConfig(shard=2, comm_hook="bf16", bucket_mb=5.0)
    assert [line.path for line in problems_of(config)] == ["parallel.bucket_mb", "parallel.comm_hook"]
    config = ParallelConfig(reshard=False, offload="states")
    assert [line.path for line in problems_of(config)] == ["parallel.reshard", "parallel.offload"]
    for mesh in ({"shard": 2}, {"tensor": 2}):
        assert problems_of(ParallelConfig(**mesh, offload="states")) == []
    assert problems_of(ParallelConfig(shard=2, reshard=False)) == problems_of(ParallelConfig(comm_hook="fp16")) == []
    assert [line.path for line in problems_of(ParallelConfig(tensor=2, comm_hook="fp16"))] == ["parallel.comm_hook"]
    assert problems_of(ParallelConfig(tensor=2, reshard=False)) == []


def test_compiled_layers_are_not_split() -> None:
    assert [line.path for line in problems_of(ParallelConfig(tensor=2), {"compile": True})] == ["train.compile"]
    assert problems_of(ParallelConfig(tensor=2)) == problems_of(ParallelConfig(shard=2), {"compile": True}) == []


def test_gradients_are_reduced_in_fp32_whatever_is_computed_in() -> None:
    for mode, gathered in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        policy = fsdp.mixed_precision(PrecisionConfig(mode=mode))
        assert (policy.param_dtype, policy.reduce_dtype) == (gathered, torch.float32)
    assert fsdp.mixed_precision(PrecisionConfig()).param_dtype is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


def refused(world: parallel.World, model: nn.Module) -> str:
    strategy = fsdp.Sharded(ParallelConfig(shard=0), PrecisionConfig(), world, ParallelDims(1, 2, world.rank))
    try:
        strategy.wrap(model, Source())
    except UserError as error:
        return error.problems[0].path
    return ""


class Source:
    """A Task of which nothing but its units is wanted."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return []

    def embeddings(self, model: nn.Module) -> list[nn.Module]:
        return []


@pytest.mark.slow
def test_models_that_cannot_be_sharded_are_refused_in_one_line(fork_server: ForkServer) -> None:
    assert run_ranks(fork_server, 2, refused, Scaled()) == ["parallel.shard"] * 2
    assert run_ranks(fork_server, 2, refused, nn.Sequential(nn.BatchNorm1d(2))) == ["task.name"] * 2


def with_a_layer_in_two_blocks() -> nn.Sequential:
    layer = nn.Linear(2, 2)
    return nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))


def of_two(first: nn.Module, second: nn.Module) -> nn.Sequential:
    model = nn.Sequential(first, second)
    model[1].bias = model[0].bias
    return model


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []),
        (of_two(nn.Linear(2, 2), nn.Linear(2, 2)), ["0.bias"]),
        (with_a_layer_in_two_blocks(), ["0.0.weight", "0.0.bias"]),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), []),
        (nn.Sequential(Scaled(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())), ["gain", "1.weight"]),
    ],
    ids=["plain", "shared", "a shared layer", "a dtype a block", "scalar and two dtypes"],
)
def test_parameters_that_fsdp_cannot_take_are_named(model: nn.Sequential, values: list[str]) -> None:
    lines = fsdp.unit_problems(model, list(model))
    assert len(lines) >= len(values)
    assert bool(lines) == bool(values)
    assert all(any(value in line for line in lines) for value in values)


def test_embedding_that_is_tied_to_another_layer_is_named() -> None:
    model = of_two(nn.Linear(2, 2), nn.Linear(2, 2))
    (line,) = fsdp.unit_problems(model, [model[0]])
    assert "0.bias" in line


class Built(LanguageModel):
    def build_model(self) -> Any:
        return nn.Linear(2, 2)


@pytest.mark.slow
def test_overridden_build_model_is_what_is_sharded(fork_server: ForkServer) -> None:
    assert run_ranks(fork_server, 2, built) == ["Linear"] * 2


def built(world: parallel.World) -> str:
    strategy = fsdp.Sharded(ParallelConfig(shard=0), PrecisionConfig(), world, ParallelDims(1, 2, world.rank))
    return type(strategy.build(Built(None, seed=0))).__name__


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({}, False),
        ({"shard 1 tensor 1": "x"}, True),
        ({"tensor 1": "x"}, True),
        ({"": "x"}, True),
        ({"shard 2 tensor 1": "x"}, False),
    ],
    ids=str,
)
def test_ranks_that_hold_the_same_must_begin_alike(changed: dict[str, str], differs: bool) -> None:
    """Eight ranks, 2 x 2 x 2: the last one holds what rank 3 does, and parts of it with others."""
    answers: dict[int, dict[str, str]] = {}
    for rank in range(8):
        shard, tensor = rank // 2 % 2, rank % 2
        held = {f"shard {shard} tensor {tensor}": f"a{shard}{tensor}", f"tensor {tensor}": f"b{tensor}", "": "c"}
        answers[rank] = held
    answers[7] = {**answers[7], **changed}
    with pytest.raises(UserError) if differs else nullcontext():
        require_same_weights(answers)


def test_tensors_are_compared_among_the_ranks_that_hold_them() -> None:
    axes = [Axis("shard", 2, 1), Axis("tensor", 2, 0)]
    held_by = {"model/norm": ("tensor",), "model/up": (), "model/table": ("shard", "tensor"), "optim/up": ()}

    def checksums(changed: str) -> dict[str, str]:
        tensors = {name: torch.full((2,), float(name == changed)) for name in held_by}
        shards = [
            LocalShard(HeldChunk(TensorMeta(name, "float32", (4,), 4), (0,), (2,), alike, 0, 1), tensors[name])
            for name, alike in held_by.items()
        ]
        return held_checksums(shards, axes)

    before = checksums("optim/up")
    assert before.keys() == {"shard 1", "shard 1 tensor 0", ""}
    for name, place in {"model/norm": "shard 1", "model/up": "shard 1 tensor 0", "model/table": ""}.items():
        after = checksums(name)
        assert {at for at in before if before[at] != after[at]} == {place}
