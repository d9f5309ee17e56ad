"""Ranks compute what one process would: gradients, accumulation, options of DDP, and the same bits after a resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lustrain.problem import UserError
from tests.fork_server import ForkServer
from tests.trainer.ranks import run_ranks
from trainer import parallel
from trainer.config import OptimizerConfig, ParallelConfig
from trainer.parallel import ddp
from trainer.step.optim import clip_, make_optimizer, model_tensors, optimizer_tensors
from trainer.step.precision import seed_streams
from trainer.tasks.models import llama

SHAPE = llama.LlamaShape(width=32, layers=2, heads=4, kv_heads=2, hidden=64, vocab_size=53)
MICRO_BATCHES = 12
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_mb": 0.01},
    {"gradient_as_bucket_view": False},
    {"static_graph": True, "bucket_mb": 0.01},
]


def micro_batch(step: int, number: int) -> Tensor:
    return torch.randint(53, (2, 17), generator=torch.Generator().manual_seed(1000 * step + number))


def backward(wrapped: nn.Module, world: parallel.World, step: int) -> float:
    """One global batch as the loop splits it; returns this rank's loss sum, leaves the mean gradient per token."""
    nominal = MICRO_BATCHES * 2 * 16
    total = 0.0
    for m in range(MICRO_BATCHES // world.world_size):
        number = m * world.world_size + world.rank
        tokens = micro_batch(step, number)
        seed_streams(0, step, number)
        with ddp.accumulate(wrapped, last=m == MICRO_BATCHES // world.world_size - 1):
            loss = wrapped(tokens[:, :-1], tokens[:, 1:])
            (loss * (world.world_size / nominal)).backward()
        total += float(loss.detach())
    return total


def warm_up(wrapped: nn.Module) -> None:
    def throw_away() -> None:
        tokens = micro_batch(0, 0)
        wrapped(tokens[:, :-1], tokens[:, 1:]).backward()

    ddp.warm_up_buckets(wrapped, throw_away)


def gradients(world: parallel.World, options: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    found = []
    for option in options:
        model = llama.build(SHAPE, length=16, seed=0)
        wrapped = ddp.wrap_ddp(model, ParallelConfig(**option), world)
        warm_up(wrapped)
        for step in (1, 2):
            model.zero_grad(set_to_none=True)
            backward(wrapped, world, step)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_accumulated_gradients_of_any_world_are_one_processs(fork_server: ForkServer, world_size: int) -> None:
    (expected,) = gradients(parallel.join(ParallelConfig(device="cpu"), {}), [{}])
    for of_rank in run_ranks(fork_server, world_size, gradients, OPTIONS):
        for option, found in zip(OPTIONS, of_rank, strict=True):
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{option}: {name}")


def count_exchanges(world: parallel.World) -> list[int]:
    wrapped = ddp.wrap_ddp(llama.build(SHAPE, length=16, seed=0), ParallelConfig(), world)
    assert isinstance(wrapped, DistributedDataParallel)
    exchanged: list[int] = []

    def counting(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, if there are any
        exchanged.append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, counting)
    warm_up(wrapped)
    exchanged.clear()
    backward(wrapped, world, 1)
    return exchanged


@pytest.mark.slow
def test_gradients_are_exchanged_per_step_not_per_micro_batch(fork_server: ForkServer) -> None:
    size = sum(p.numel() for p in llama.build(SHAPE, length=16, seed=0).parameters())
    for exchanged in run_ranks(fork_server, 2, count_exchanges):
        assert sum(exchanged) == size


def train(wrapped: nn.Module, model: nn.Module, optimizer: Any, world: parallel.World, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        (total,) = parallel.all_reduce_stats(world, [backward(wrapped, world, step)])
        clip_(list(model.parameters()), 1.0, scale=1.0)
        optimizer.step()
        losses.append(total / (MICRO_BATCHES * 2 * 16))
    return losses


def train_with_hooks(world: parallel.World, hooks: list[str]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    results = {}
    for hook in hooks:
        model = llama.build(SHAPE, length=16, seed=0)
        optimizer = make_optimizer(model, OptimizerConfig(lr=1e-2))
        config = ParallelConfig(comm_hook=hook, bucket_mb=0.05)
        wrapped = ddp.wrap_ddp(model, config, world)
        warm_up(wrapped)
        # The same few batches over and over: something that can be learned in a dozen steps.
        losses = [train(wrapped, model, optimizer, world, range(1, 2))[0] for _ in range(12)]
        results[hook] = losses, {name: p.detach().clone() for name, p in model.named_parameters()}
    return results


@pytest.mark.slow
def test_every_communication_hook_trains_and_keeps_ranks_alike(fork_server: ForkServer) -> None:
    hooks = ["none", "fp16"]  # bf16 needs NCCL
    first, second = run_ranks(fork_server, 2, train_with_hooks, hooks)
    for hook in hooks:
        losses, weights = first[hook]
        assert losses[-1] < 0.93 * losses[0], hook
        assert losses == second[hook][0]
        assert all(torch.equal(weights[name], second[hook][1][name]) for name in weights), hook
    assert len({tuple(first[hook][0]) for hook in hooks}) == len(hooks), "each hook must round in its own way"


def interrupted(world: parallel.World) -> tuple[list[float], list[float], bool]:
    """Losses of a whole run, of one that was cut after step 3, and whether both end with the same weights."""

    def begin() -> tuple[nn.Module, nn.Module, Any]:
        model = llama.build(SHAPE, length=16, seed=0)
        optimizer = make_optimizer(model, OptimizerConfig(lr=3e-3))
        wrapped = ddp.wrap_ddp(model, ParallelConfig(bucket_mb=0.01), world)
        warm_up(wrapped)
        return wrapped, model, optimizer

    wrapped, model, optimizer = begin()
    whole = train(wrapped, model, optimizer, world, range(1, 4))
    saved = copy.deepcopy(model_tensors(model) | optimizer_tensors(model, optimizer))
    whole += train(wrapped, model, optimizer, world, range(4, 9))

    wrapped, again, optimizer = begin()
    for name, tensor in (model_tensors(again) | optimizer_tensors(again, optimizer)).items():
        tensor.copy_(saved[name])
    resumed = train(wrapped, again, optimizer, world, range(4, 9))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    return whole, resumed, same


@pytest.mark.slow
def test_a_resumed_run_of_three_ranks_has_the_same_loss_bits(fork_server: ForkServer) -> None:
    for whole, resumed, same in run_ranks(fork_server, 3, interrupted):
        assert resumed == whole[3:]
        assert same


def statistics(world: parallel.World) -> str:
    try:
        ddp.wrap_ddp(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), ParallelConfig(), world)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_models_whose_buffers_learn_are_refused_on_several_ranks(fork_server: ForkServer) -> None:
    for message in run_ranks(fork_server, 2, statistics):
        assert "batch normalisation" in message


def test_one_rank_needs_no_wrapper_and_nothing_to_warm_up() -> None:
    world = parallel.join(ParallelConfig(device="cpu"), {})
    model = nn.Linear(2, 2)
    assert ddp.wrap_ddp(model, ParallelConfig(), world) is model
    ddp.warm_up_buckets(model, lambda: pytest.fail("nothing to warm up"))


def test_a_hook_is_refused_where_torch_cannot_run_it() -> None:
    def lines(hook: str, device: str) -> list[str]:
        problems = ddp.problems(ParallelConfig(comm_hook=hook), device=torch.device(device))
        return [line.split(": ")[0] for line in problems]

    assert lines("bf16", "cpu") == ["parallel.comm_hook = 'bf16'"]
    assert lines("bf16", "cuda") == lines("fp16", "cpu") == []
