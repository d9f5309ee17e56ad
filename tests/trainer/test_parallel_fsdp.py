"""A sharded run is the same training: losses of one rank, bits of its own after a resume, and any mesh goes on from any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.trainer.meshes import MeshRuns, equal
from tests.trainer.ranks import run_ranks
from trainer import parallel
from trainer.config import Config, ParallelConfig, PrecisionConfig
from trainer.generation import require_same_weights
from trainer.parallel import choose, fsdp
from trainer.parallel.mesh import ParallelDims, mesh_problems
from trainer.tasks.language_model import LanguageModel

CONFIG = Config.model_validate(
    {"run": {"uri": "run"}, "task": {"name": "t"}, "train": {"steps": 1, "global_batch": 2, "micro_batch": 1}}
)


@pytest.mark.slow
def test_sharded_run_has_one_ranks_losses_and_resumes_to_the_bit(fork_server: ForkServer, tmp_path: Path) -> None:
    runs = MeshRuns(fork_server, tmp_path)
    runs.train("one", "one")
    runs.train("whole", "hsdp2x2")
    for mine, ones in zip(runs.steps("whole"), runs.steps("one"), strict=True):
        assert mine == pytest.approx(ones, rel=1e-5)
    runs.train("parts", "hsdp2x2", "train.steps=5")
    runs.train("parts", "hsdp2x2")
    assert runs.steps("parts") == runs.steps("whole")
    assert equal(runs.tensors("parts"), runs.tensors("whole"))


@pytest.mark.parametrize(
    ("shard", "ranks", "paths"),
    [
        (1, 3, []),
        (3, 6, []),
        (0, 5, []),
        (4, 6, ["parallel.shard"]),
        (8, 6, ["parallel.shard"]),
    ],
)
def test_mesh_that_the_ranks_cannot_make_is_named(shard: int, ranks: int, paths: list[str]) -> None:
    config = ParallelConfig(shard=shard)
    assert [line.path for line in mesh_problems(config, ranks)] == paths


def test_ranks_of_a_replica_are_neighbours() -> None:
    dims = [ParallelDims(replicate=2, shard=3, rank=rank) for rank in range(6)]
    assert [one.shard_rank for one in dims] == [0, 1, 2, 0, 1, 2]
    assert [one.axes[0].coordinate for one in dims] == [0, 0, 0, 1, 1, 1]
    assert {(one.data_rank, one.data_size) for one in dims} == {(rank, 6) for rank in range(6)}


def problems_of(config: ParallelConfig) -> Sequence[Any]:
    world = parallel.World(0, 2, 0, torch.device("cpu"), torch.distributed.HashStore())
    return list(choose.problems(CONFIG.model_copy(update={"parallel": config}), world))


def test_options_of_the_other_strategy_are_refused() -> None:
    config = ParallelConfig(shard=2, comm_hook="bf16", bucket_mb=5.0)
    assert [line.path for line in problems_of(config)] == ["parallel.bucket_mb", "parallel.comm_hook"]
    assert [line.path for line in problems_of(ParallelConfig(reshard=False))] == ["parallel.reshard"]
    assert problems_of(ParallelConfig(shard=2, reshard=False)) == problems_of(ParallelConfig(comm_hook="fp16")) == []


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
    """A Task of which nothing but its blocks is wanted."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return []


@pytest.mark.slow
def test_models_that_cannot_be_sharded_are_refused_in_one_line(fork_server: ForkServer) -> None:
    assert run_ranks(fork_server, 2, refused, Scaled()) == ["parallel.shard"] * 2
    assert run_ranks(fork_server, 2, refused, nn.Sequential(nn.BatchNorm1d(2))) == ["task.name"] * 2


def of_two(first: nn.Module, second: nn.Module) -> nn.Sequential:
    model = nn.Sequential(first, second)
    model[1].bias = model[0].bias
    return model


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []),
        (of_two(nn.Linear(2, 2), nn.Linear(2, 2)), ["0.bias"]),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), []),
        (nn.Sequential(Scaled(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())), ["gain", "1.weight"]),
    ],
    ids=["plain", "shared", "a dtype a block", "scalar and two dtypes"],
)
def test_parameters_that_fsdp_cannot_take_are_named(model: nn.Sequential, values: list[str]) -> None:
    lines = fsdp.unit_problems(model, list(model))
    assert len(lines) >= len(values)
    assert bool(lines) == bool(values)
    assert all(any(value in line for line in lines) for value in values)


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
    [({}, False), ({"weights": "x"}, True), ({"whole": "x"}, True), ({"shard": 2, "weights": "c"}, False)],
    ids=str,
)
def test_ranks_that_hold_the_same_must_begin_alike(changed: dict[str, Any], differs: bool) -> None:
    answers = {rank: {"shard": rank % 2, "weights": "ab"[rank % 2], "whole": "w"} for rank in range(4)}
    answers[3] |= changed
    with pytest.raises(UserError) if differs else nullcontext():
        require_same_weights(answers)
