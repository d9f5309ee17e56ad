"""AdamW decays matrices only, its state is named, complete before the first step, and comes back bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lustrain.problem import UserError
from tests.sharded import mesh_of_two
from trainer.config import OptimizerConfig
from trainer.step.optim import (
    allocate_state,
    clip_,
    make_optimizer,
    model_tensors,
    optimizer_tensors,
    set_lr,
)
from trainer.tasks.models import llama

SHAPE = llama.LlamaShape(width=16, layers=2, heads=2, kv_heads=1, hidden=24, vocab_size=19)


def backward(model: nn.Module, seed: int) -> None:
    data = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(seed))
    model(data[:, :-1], data[:, 1:]).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False, None])
def test_it_is_torchs_adamw_with_decay_of_matrices_only(fused: bool | None) -> None:
    model = llama.build(SHAPE, length=8, seed=0)
    plain = copy.deepcopy(model)
    config = OptimizerConfig(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.5, fused=fused)
    optimizer = make_optimizer(model, config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, fused=fused is not False)
    train(model, optimizer, range(3))
    train(plain, reference, range(3))
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, expected) or fused is False, name
        torch.testing.assert_close(parameter, expected)


def test_every_state_tensor_is_there_by_name_before_first_step() -> None:
    model = llama.build(SHAPE, length=8, seed=0)
    optimizer = make_optimizer(model, OptimizerConfig())
    before = optimizer_tensors(model, optimizer)
    assert set(before) == {
        f"optim/{n}/{s}" for n, _ in model.named_parameters() for s in ("exp_avg", "exp_avg_sq", "step")
    }
    assert all(not tensor.any() for tensor in before.values())
    train(model, optimizer, range(2))
    after = optimizer_tensors(model, optimizer)
    assert all(before[name] is after[name] for name in before), "state must stay where the staging buffers expect it"
    assert float(after["optim/embed.weight/step"]) == 2.0


def test_model_tensors_name_each_weight_once_sans_tables() -> None:
    model = llama.build(SHAPE, length=8, seed=0)
    tensors = model_tensors(model)
    assert set(tensors) == {f"model/{name}" for name, _ in model.named_parameters()}
    assert tensors["model/embed.weight"].data_ptr() == model.embed.weight.data_ptr()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

    assert set(model_tensors(Tied())) == {"model/a.weight"}


class Views(nn.Module):
    """Has every way in which two names can share memory; the first of them is the smaller part of the second."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(12.0).view(4, 3)
        self.register_buffer("first_row", whole[0])
        self.whole = nn.Parameter(whole)
        self.tied = self.whole
        self.register_buffer("alias", whole.view(4, 3))
        self.register_buffer("turned", whole.view(3, 4))
        self.register_buffer("bits", whole.view(torch.int32))
        self.register_buffer("last_rows", whole[2:])
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("none_either", torch.zeros(0, 3))


def test_only_names_of_the_very_same_elements_are_tied() -> None:
    views = Views()
    tensors = model_tensors(views)
    assert {f"model/{name}" for name in views.state_dict()} - set(tensors) == {"model/tied", "model/alias"}
    assert all(torch.equal(tensor, views.state_dict()[name.removeprefix("model/")]) for name, tensor in tensors.items())


def refused(call: Callable[..., object], *args: object) -> list[str]:
    """The names of the entries for which it refuses to list what is saved."""
    with pytest.raises(UserError) as error:
        call(*args)
    return [line.partition(":")[0].partition(" =")[0] for line in error.value.problems]


def test_every_shard_of_a_sharded_model_is_saved_and_ties_once() -> None:
    with mesh_of_two() as mesh:
        model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[1].weight
        fully_shard(model, mesh=mesh)
        tensors = model_tensors(model)
        assert list(tensors) == ["model/0.weight", "model/1.weight", "model/1.bias", "model/2.bias"]
        optimizer = make_optimizer(model, OptimizerConfig())
        trained = {name.removeprefix("model/") for name in tensors}
        assert {name.split("/")[1] for name in optimizer_tensors(model, optimizer)} == trained


def test_stored_entry_that_is_no_tensor_is_refused_by_name() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> object:
            return {"calls": 3}

    assert refused(model_tensors, nn.Sequential(Counting(2, 2))) == ["model/0._extra_state"]


def test_parameter_that_the_state_dict_leaves_out_is_named() -> None:
    def leave_out(module: nn.Module, entries: dict[str, Tensor], prefix: str, local: object) -> None:
        del entries["weight"]

    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(leave_out)
    assert refused(model_tensors, model) == ["model/weight"]


def test_trained_parameter_without_saved_state_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    assert refused(optimizer_tensors, model, optimizer) == [f"optim/{name}" for name, _ in model.named_parameters()]
    allocate_state(optimizer)
    optimizer_tensors(model, optimizer)
    del optimizer.state[model[0].bias]["exp_avg"]
    optimizer.state[model[1].bias]["step"] = 3.0
    assert refused(optimizer_tensors, model, optimizer) == ["optim/0.bias/exp_avg", "optim/1.bias/step"]


def test_parameter_that_the_optimizer_does_not_train_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig())
    assert not any(name.startswith("optim/0.bias/") for name in optimizer_tensors(model, optimizer))
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    replaced = refused(optimizer_tensors, model, optimizer)
    assert replaced == ["optimizer.param_groups[0].params[1]", "optim/1.weight"]


def with_grads(values: list[list[float]]) -> list[Tensor]:
    parameters = [torch.zeros(len(v), requires_grad=True) for v in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


# The square of a smaller number would be 0 in single precision.
finite = st.just(0.0) | st.floats(2**-60, 100, width=32) | st.floats(-100, -(2**-60), width=32)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.lists(finite, min_size=1, max_size=5), min_size=1, max_size=4),
    max_norm=st.sampled_from([0.0, 0.5, 1.0, 50.0]),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
)
def test_clipping_joins_scale_and_limit(values: list[list[float]], max_norm: float, scale: float) -> None:
    parameters = with_grads(values)
    norm = math.sqrt(sum((x * scale) ** 2 for v in values for x in v))
    factor = min(1.0, max_norm / norm) if max_norm and norm else 1.0
    assert clip_(parameters, max_norm, scale=scale) == pytest.approx(norm, rel=1e-5, abs=1e-30)
    for parameter, value in zip(parameters, values, strict=True):
        expected = torch.tensor([x * scale * factor for x in value])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


def test_gradients_within_the_limit_are_not_touched() -> None:
    parameters = with_grads([[0.3, -0.4]])
    version = parameters[0].grad._version
    assert clip_(parameters, 1.0, scale=1.0) == pytest.approx(0.5)
    assert parameters[0].grad._version == version, "a factor of exactly 1 must not cost a pass"


def test_gradients_that_are_not_finite_are_reported_only() -> None:
    parameters = with_grads([[1.0, math.inf], [2.0]])
    assert not math.isfinite(clip_(parameters, 1.0, scale=0.5))
    assert parameters[1].grad.tolist() == [2.0]


def test_parameters_without_gradients_count_as_nothing() -> None:
    assert clip_([torch.zeros(3, requires_grad=True)], 1.0, scale=2.0) == 0.0


def test_the_rate_reaches_every_group() -> None:
    model = llama.build(SHAPE, length=8, seed=0)
    optimizer = make_optimizer(model, OptimizerConfig())
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
