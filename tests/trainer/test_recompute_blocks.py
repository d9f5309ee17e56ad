"""Recomputation and compilation change what is kept and how it runs, never the names, and recomputation not one bit."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import require
from trainer.step.optim import model_tensors
from trainer.step.recompute import Kind, compile_blocks, recompute_blocks
from trainer.tasks.models import llama

SHAPE = llama.LlamaShape(width=32, layers=2, heads=4, kv_heads=2, hidden=64, vocab_size=37, dropout=0.2)
IDS = torch.randint(37, (2, 17), generator=torch.Generator().manual_seed(0))


class MatmulCounter(TorchDispatchMode):
    """Counts matrix products, so that recomputed ones show."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def step(kind: Kind, *, dropout: float = 0.2) -> tuple[float, dict[str, torch.Tensor], int, int]:
    """Loss, gradients, matrix products in backward, and bytes kept between forward and backward."""
    model = llama.build(dataclasses.replace(SHAPE, dropout=dropout), length=16, seed=0)
    recompute_blocks(list(model.blocks), kind)
    torch.manual_seed(0)
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(IDS[:, :-1], IDS[:, 1:])
    with MatmulCounter() as counter:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads, counter.products, kept


def test_recomputation_changes_no_bit_dropout_included() -> None:
    loss, grads, _, _ = step("none")
    for kind in ("selective", "full"):
        again, same, _, _ = step(kind)
        assert again == loss
        assert grads.keys() == same.keys()
        assert all(torch.equal(grads[name], same[name]) for name in grads), kind


def test_full_recomputes_every_product_selective_every_second() -> None:
    plain, selective, full = (step(kind, dropout=0.0)[2] for kind in ("none", "selective", "full"))
    per_block = 6  # query, key, value, output, gate, up; nothing in backward needs the result of down
    assert full - plain == 2 * per_block
    assert selective - plain == 2 * (per_block // 2)


def test_full_keeps_a_fraction_of_the_activations() -> None:
    assert step("full")[3] < step("none")[3] / 4


def test_without_gradients_nothing_is_recomputed_or_different() -> None:
    plain, wrapped = (llama.build(SHAPE, length=16, seed=0).eval() for _ in range(2))
    recompute_blocks(list(wrapped.blocks), "full")
    with torch.no_grad():
        assert torch.equal(plain(IDS[:, :-1]), wrapped(IDS[:, :-1]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_parameter_names_stay_as_they_are(kind: Kind) -> None:
    plain, wrapped = (llama.build(SHAPE, length=16, seed=0) for _ in range(2))
    recompute_blocks(list(wrapped.blocks), kind)
    compile_blocks(list(wrapped.blocks), "default")
    assert list(model_tensors(plain)) == list(model_tensors(wrapped))


@pytest.mark.slow
def test_compiled_blocks_compute_the_same() -> None:
    """With recomputation, which is compiled too; each compilation takes ten seconds."""
    require(shutil.which("g++"), "torch.compile on the CPU needs g++ (apt-get install g++)")
    shape = dataclasses.replace(SHAPE, dropout=0.0)
    plain, compiled = (llama.build(shape, length=16, seed=0) for _ in range(2))
    recompute_blocks(list(compiled.blocks), "selective")
    compile_blocks(list(compiled.blocks), "default")
    losses = [model(IDS[:, :-1], IDS[:, 1:]) for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-4)
    for loss in losses:
        loss.backward()
    for (name, expected), found in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
