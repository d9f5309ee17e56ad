"""The decoder computes what Hugging Face's Llama computes, starts from its seed alone, and knows its own cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.tasks.models import llama

SMALL = llama.LlamaShape(width=32, layers=2, heads=4, kv_heads=2, hidden=48, vocab_size=61)


def tokens(batch: int, length: int, vocabulary: int = SMALL.vocab_size, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def hugging_face_logits(weights: dict[str, Tensor], config: dict[str, object], ids: Tensor) -> Tensor:
    """LlamaForCausalLM written out from transformers' modeling_llama.py, one head at a time and with an explicit mask."""

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]))

    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    dim = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    length = ids.shape[1]
    inverse = 1.0 / (config["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    frequencies = torch.arange(length).float()[:, None] @ inverse[None, :]
    embedding = torch.cat((frequencies, frequencies), dim=-1)
    cos, sin = embedding.cos(), embedding.sin()
    mask = torch.full((length, length), -math.inf).triu(1)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = rms(x, weights[at + "input_layernorm.weight"])
        q, k, v = (h @ weights[f"{at}self_attn.{n}_proj.weight"].T for n in "qkv")
        outputs = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            qh, kh, vh = (y[..., i * dim : (i + 1) * dim] for y, i in ((q, head), (k, group), (v, group)))
            qh, kh = (y * cos + rotate_half(y) * sin for y in (qh, kh))
            outputs.append(torch.softmax(qh @ kh.transpose(1, 2) / math.sqrt(dim) + mask, dim=-1) @ vh)
        x = x + torch.cat(outputs, dim=-1) @ weights[at + "self_attn.o_proj.weight"].T
        h = rms(x, weights[at + "post_attention_layernorm.weight"])
        gate, up = (h @ weights[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms(x, weights["model.norm.weight"]) @ head.T


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_exported_weights_give_hugging_faces_llama_same_logits(tied: bool, kv_heads: int) -> None:
    shape = dataclasses.replace(SMALL, tied=tied, kv_heads=kv_heads, rope_theta=5000.0, norm_eps=1e-3)
    model = llama.build(shape, length=24, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.1
            )
    names = llama.huggingface_names(model)
    exported = {names[name]: parameter.detach() for name, parameter in model.named_parameters()}
    assert len(exported) == len(names) == len(list(model.parameters()))
    assert ("lm_head.weight" in exported) != tied
    ids = tokens(3, 24)
    expected = hugging_face_logits(exported, llama.huggingface_config(model), ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_weights_are_a_function_of_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first = llama.build(SMALL, length=8, seed=7)
    assert torch.equal(before, torch.get_rng_state()), "building the model must not draw from the global generator"
    torch.manual_seed(123)
    again, other = llama.build(SMALL, length=8, seed=7), llama.build(SMALL, length=8, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_layers_that_write_the_residual_start_smaller_with_depth() -> None:
    shape = llama.LlamaShape(width=128, layers=8, heads=4, kv_heads=4, hidden=256, vocab_size=64)
    model = llama.build(shape, length=8, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert bool((parameter == 1).all()), name
        else:
            written = name.endswith(("output.weight", "down.weight"))
            expected = 0.02 / math.sqrt(2 * 8) if written else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05), name


def test_a_token_is_not_seen_before_its_time() -> None:
    model = llama.build(SMALL, length=16, seed=1)
    ids = tokens(2, 16)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % SMALL.vocab_size
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("chunk", [0, 7, 1000])
def test_the_loss_is_the_sum_of_cross_entropies_however_chunked(chunk: int) -> None:
    model = llama.build(SMALL, length=12, seed=1, loss_chunk=chunk)
    ids, targets = tokens(3, 12), tokens(3, 12, seed=1)
    expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    expected_grad = torch.autograd.grad(expected, model.embed.weight)[0]
    loss = model(ids, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, model.embed.weight)[0], expected_grad)


def test_bf16_autocast_keeps_loss_in_fp32_and_near_the_exact_one() -> None:
    model = llama.build(SMALL, length=12, seed=1)
    ids, targets = tokens(3, 12), tokens(3, 12, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(ids, targets).item(), rel=1e-2)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "major", "takes"),
    [
        ("cuda", torch.bfloat16, 128, 9, True),
        ("cuda", torch.float16, 256, 8, True),
        ("cuda", torch.float32, 64, 9, False),
        ("cuda", torch.float16, 512, 9, False),
        ("cuda", torch.float16, 64, 7, False),
        ("cpu", torch.float32, 64, 0, True),
    ],
)
def test_grouped_heads_go_to_a_kernel_that_takes_them(
    device: str, dtype: torch.dtype, head_dim: int, major: int, takes: bool
) -> None:
    assert llama.fused_kernel_takes_groups(device, dtype, head_dim, major) == takes


def test_repeated_heads_give_the_results_of_grouped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[tuple[int, ...], bool]] = []
    attention = F.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert key.shape == value.shape
        shapes.append((tuple(key.shape), options["enable_gqa"]))
        return attention(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    ids, targets, results = tokens(2, 12), tokens(2, 12, seed=1), []
    for takes_groups in (True, False):
        monkeypatch.setattr(llama, "fused_kernel_takes_groups", lambda *_, takes=takes_groups: takes)
        model = llama.build(SMALL, length=12, seed=1)
        loss = model(ids, targets)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(results[1], results[0])
    assert set(shapes[:2]) == {((2, 2, 12, 8), True)}
    assert set(shapes[2:]) == {((2, 4, 12, 8), False)}


def test_dropout_acts_in_training_only() -> None:
    model = llama.build(dataclasses.replace(SMALL, dropout=0.5), length=12, seed=1)
    ids = tokens(2, 12)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 40), heads=st.integers(1, 12), kv_heads=st.integers(1, 12))
def test_shape_without_problems_computes_others_name_them_all(width: int, heads: int, kv_heads: int) -> None:
    shape = llama.LlamaShape(width=width, layers=1, heads=heads, kv_heads=kv_heads, hidden=8, vocab_size=11)
    lines = llama.shape_problems(shape, "task.model")
    bad_heads = width % heads != 0 or (width // heads) % 2 != 0
    assert any(line.startswith("task.model.heads = ") for line in lines) == bad_heads
    assert any(line.startswith("task.model.kv_heads = ") for line in lines) == (heads % kv_heads != 0)
    if not lines:
        assert llama.build(shape, length=5, seed=0)(tokens(2, 5, 11)).shape == (2, 5, 11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "vocabulary", "millions"),
    [("tiny", 8192, 1.8), ("llama-124m", 50257, 124), ("1b", 128256, 1236), ("8b", 128256, 8030)],
)
def test_presets_have_the_size_they_promise(name: str, vocabulary: int, millions: float) -> None:
    shape = dataclasses.replace(llama.PRESETS[name], vocab_size=vocabulary)
    assert llama.shape_problems(shape, "") == []
    with torch.device("meta"):
        model = llama.Llama(shape, length=16)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_are_those_that_torch_counts(tied: bool) -> None:
    shape = dataclasses.replace(SMALL, tied=tied)
    model = llama.build(shape, length=16, seed=0)
    ids = tokens(2, 16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    assert counter.get_total_flops() / ids.numel() == llama.flops_per_token(shape, 16)
