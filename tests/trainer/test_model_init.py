"""Weights do not depend on how a parameter is cut: each chunk draws the numbers that the whole has there."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from trainer.tasks.models import init, llama
from trainer.tasks.models.init import fill_chunk, fill_normal


def drawn(shape: tuple[int, ...], name: str = "embed.weight", seed: int = 5) -> Tensor:
    whole = torch.full(shape, torch.nan)
    fill_normal(name, whole, std=0.5, seed=seed)
    return whole


@pytest.mark.parametrize("shape", [(97,), (97, 12), (3, 40), (1, 50), (8, 3, 5, 5)], ids=str)
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2), (7, 2)], ids=str)
def test_chunks_of_any_grid_equal_the_whole(
    shape: tuple[int, ...], grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 64)
    whole = drawn(shape)
    pieces = torch.full(shape, torch.nan)
    cuts = [torch.arange(size).chunk(parts) for size, parts in zip(shape, grid, strict=False)]
    for places in product(*cuts):
        at = tuple(slice(int(place[0]), int(place[-1]) + 1) for place in places)
        offsets = (*(cut.start for cut in at), *(0,) * (len(shape) - len(at)))
        fill_chunk("embed.weight", pieces[at], shape, offsets, std=0.5, seed=5)
    assert torch.equal(pieces, whole)


def test_numbers_are_normal_and_no_two_blocks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 4096)
    whole = drawn((256, 128))
    assert float(whole.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(whole.std()) == pytest.approx(0.5, rel=0.02)
    assert len({tuple(block.flatten().tolist()) for block in whole.split(32)}) == 8


def test_another_name_or_seed_draws_other_numbers() -> None:
    whole = drawn((8, 8))
    assert not torch.equal(whole, drawn((8, 8), name="head.weight"))
    assert not torch.equal(whole, drawn((8, 8), seed=6))
    assert torch.equal(whole, drawn((8, 8)))


def test_empty_chunk_is_left_alone() -> None:
    fill_chunk("embed.weight", torch.empty(0, 4), (2, 4), (2, 0), std=1.0, seed=0)


@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (-1, 0), (0,)], ids=str)
def test_chunk_outside_the_parameter_is_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"embed\.weight"):
        fill_chunk("embed.weight", torch.empty(2, 4), (2, 4), offsets, std=1.0, seed=0)


def test_one_matrix_does_not_decide_about_another() -> None:
    """A deeper model begins with the same first layers: weights hang on names, not on the order of parameters."""
    shape = llama.LlamaShape(width=16, layers=1, heads=2, kv_heads=2, hidden=24, vocab_size=11)
    deeper = llama.LlamaShape(width=16, layers=2, heads=2, kv_heads=2, hidden=24, vocab_size=11)
    shallow, deep = (dict(llama.build(s, length=4, seed=1).named_parameters()) for s in (shape, deeper))
    assert torch.equal(shallow["blocks.0.attention.query.weight"], deep["blocks.0.attention.query.weight"])
