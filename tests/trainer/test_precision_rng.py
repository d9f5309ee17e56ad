"""Random streams depend on the place in the run alone; number formats and policies can be taken back."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from trainer.config import OptimizerConfig, PrecisionConfig
from trainer.step import precision
from trainer.step.optim import clip_, make_optimizer, model_tensors, optimizer_tensors
from trainer.tasks.models import llama

CPU = torch.device("cpu")


def draw() -> list[float]:
    values = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.normal())]
    return [*values, *torch.rand(3).tolist(), float(torch.randn(()))]


def test_no_two_places_in_the_run_share_a_seed() -> None:
    seeds = {precision.stream_seed(s, t, m) for s in range(8) for t in range(64) for m in range(64)}
    assert len(seeds) == 8 * 64 * 64


def test_splitmix64_gives_the_published_sequence() -> None:
    # The first outputs for seed 1234567: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(precision.splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_micro_batchs_streams_repeat_and_differ_from_anothers() -> None:
    def drawn(*place: int) -> list[float]:
        precision.seed_streams(*place)
        return draw()

    places = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (2**63 - 1, 0, 0)]
    first = [drawn(*place) for place in places]
    assert first == [drawn(*place) for place in places]
    assert len({number for numbers in first for number in numbers}) == len(places) * len(first[0])


@pytest.mark.parametrize(
    ("mode", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_uses_the_named_format_and_only_fp16_scales(mode: str, dtype: torch.dtype) -> None:
    config = PrecisionConfig(mode=mode)
    with precision.autocast(config, CPU):
        assert torch.nn.Linear(4, 4)(torch.rand(2, 4)).dtype == dtype
    assert precision.make_scaler(config, CPU).is_enabled() == (mode == "fp16")


def test_a_scaler_without_fp16_has_no_state_and_takes_none() -> None:
    scaler = precision.make_scaler(PrecisionConfig(), CPU)
    assert precision.scaler_state(scaler) == {}
    precision.load_scaler(scaler, {"scale": 2.0})
    fresh = precision.make_scaler(PrecisionConfig(mode="fp16"), CPU)
    precision.load_scaler(fresh, {})
    assert fresh.get_scale() == 65536.0


def test_policies_end_with_their_context() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    before = torch.get_float32_matmul_precision()
    with precision.matmul_policy(PrecisionConfig(matmul="medium")), precision.deterministic(True):
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == before
    assert not torch.are_deterministic_algorithms_enabled()
    with precision.deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_fp16_overflow_changes_no_weight_or_moment_and_goes_on() -> None:
    model = llama.build(
        llama.LlamaShape(width=16, layers=1, heads=2, kv_heads=1, hidden=24, vocab_size=19), length=8, seed=0
    )
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-2))
    config = PrecisionConfig(mode="fp16", fp16_initial_scale=2.0**40)
    scaler = precision.make_scaler(config, CPU)
    ids = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(0))
    losses, skipped = [], 0
    for _ in range(40):
        optimizer.zero_grad()
        with precision.autocast(config, CPU):
            loss = model(ids[:, :-1], ids[:, 1:]) / 16
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_(list(model.parameters()), 1.0, scale=1.0)
        state = model_tensors(model) | optimizer_tensors(model, optimizer)
        before = {name: tensor.clone() for name, tensor in state.items()}
        scaler.step(optimizer)
        scaler.update()
        if not math.isfinite(norm):
            skipped += 1
            assert all(torch.equal(state[name], before[name]) for name in state)
        losses.append(float(loss.detach()))
    assert 0 < skipped < 35
    assert losses[-1] < losses[0]
    assert float(state["optim/embed.weight/step"]) == 40 - skipped
