"""A run with tensor ranks is the same training; what its ranks cannot split is one line before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.sharded import mesh_of_two
from tests.trainer.meshes import MeshRuns, assert_losses_of_one_rank
from trainer.config import TaskConfig
from trainer.parallel.tensor import split_model
from trainer.tasks import make_task


@pytest.mark.slow
def test_tensor_ranks_have_the_losses_of_one_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    runs = MeshRuns(fork_server, tmp_path, tied=False, dropout=0.0)
    sets = ("train.steps=3", "metrics.batch_digest=true")
    runs.train("one", "one", *sets)
    runs.train("split", "tp2", *sets)
    assert_losses_of_one_rank(runs.steps("split"), runs.steps("one"))
    assert runs.records("split", "tokens", "batch_digest") == runs.records("one", "tokens", "batch_digest")


@pytest.mark.parametrize(
    ("changed", "paths"),
    [
        ({}, []),
        ({"seq_len": 6}, ["task.seq_len"]),
        ({"model": {"kv_heads": 2}}, ["task.model.kv_heads"]),
        ({"model": {"heads": 6, "kv_heads": 6}}, ["task.model.heads", "task.model.kv_heads"]),
        ({"model": {"hidden": 18}}, ["task.model.hidden"]),
        ({"model": {"dropout": 0.1}}, ["task.model.dropout"]),
    ],
    ids=str,
)
def test_options_that_four_ranks_cannot_split_are_named(changed: dict[str, Any], paths: list[str]) -> None:
    shape = {"width": 24, "layers": 1, "heads": 4, "kv_heads": 4, "hidden": 20, "vocab_size": 31, "dropout": 0.0}
    options = {"data": "tokens", "seq_len": 8} | changed | {"model": shape | changed.get("model", {})}
    task = make_task(TaskConfig.model_validate({"name": "language_model"} | options), seed=0)
    assert [line.path for line in task.tensor_problems(4)] == paths


def test_task_without_a_plan_is_refused() -> None:
    task = make_task(TaskConfig.model_validate({"name": "image_classification"}), seed=0)
    assert [line.path for line in task.tensor_problems(2)] == ["parallel.tensor"]


def refusals(plan: dict[str, Any] | None) -> list[str]:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.LayerNorm(2))
    model[1].weight = model[0].weight
    with mesh_of_two() as mesh, pytest.raises(UserError) as caught:
        split_model(model, plan, mesh)
    return [line.partition(": ")[0].removeprefix("parallel.tensor = ") for line in caught.value.problems]


def test_plan_that_leaves_out_or_unties_parameters_is_refused() -> None:
    column, left_out, untied = ColwiseParallel(), ["'2.weight'", "'2.bias'"], ["'0.weight, 1.weight'"]
    assert refusals(None) == ["2"]
    assert refusals({"0": column}) == ["'1.weight'", *left_out, *untied]
    assert refusals({"0": column, "1": column}) == [*left_out, *untied]
    assert refusals({"0": column, "1": column, "2": SequenceParallel()}) == untied
