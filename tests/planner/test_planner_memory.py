"""The memory that a plan says is what torch allocates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planner.hardware import node_of
from planner.memory import CPU, memory
from planner.strategy import Strategy
from planner.work import Recompute, Work
from tests.planner.fake_training import CASES, a_rank_of_eight, admitted_error, kept_bytes, peak_bytes, shape_of
from trainer.config import PrecisionConfig

BF16 = PrecisionConfig(mode="bf16")
PAGE = Path(__file__).parents[2] / "docs/train.md"


@pytest.fixture(scope="module", autouse=True)
def rank_of_eight() -> Iterator[None]:
    with a_rank_of_eight():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("work", "strategy"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_peak_is_what_torch_allocates(work: Work, strategy: Strategy) -> None:
    planned, real = memory(work, strategy, CPU), peak_bytes(work, strategy)
    assert planned.total == pytest.approx(real, rel=admitted_error(work))
    # State is exact, so that it alone could hide what the rest lacks.
    assert planned.total - planned.state == pytest.approx(real - planned.state, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama-124m", "8b", "70b"])
def test_activations_of_whole_models_are_what_autograd_keeps(preset: str) -> None:
    work = Work(shape_of(preset), 2048, 1, 1, 0, BF16)
    planned = memory(work, Strategy(1, 1), CPU)
    assert planned.activations + planned.gathered == pytest.approx(kept_bytes(work), rel=0.01)


def test_shards_divide_the_state_and_replicas_do_not() -> None:
    work = Work(shape_of("8b"), 4096, 16, 1, 0, BF16)
    whole, fsdp, hsdp = (memory(work, one).state for one in (Strategy(16, 1), Strategy(1, 16), Strategy(2, 8)))
    assert whole == pytest.approx(16 * work.parameters, rel=1e-6)
    assert fsdp == pytest.approx(whole / 16, rel=1e-6)
    assert hsdp == pytest.approx(whole / 8, rel=1e-6)


@pytest.mark.parametrize(("micro_batches", "views", "copies"), [(8, True, 1), (8, False, 2), (16, True, 2)])
def test_ddp_holds_gradients_beside_its_buckets(micro_batches: int, views: bool, copies: int) -> None:
    """Without views always, with them while micro-batches add up."""
    work = Work(shape_of("1b"), 2048, micro_batches, 1, 0, BF16, bucket_views=views)
    assert memory(work, Strategy(8, 1)).gradients == copies * 4 * work.parameters


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_tensor_ranks_divide_no_inputs_of_products(recompute: Recompute) -> None:
    """What is gathered from all positions is kept whole, and of `selective` the product that is summed over the ranks."""
    work = Work(shape_of("8b", 2), 4096, 2, 1, 0, BF16)
    width = work.compute_bytes * work.tokens * work.shape.width
    four, eight = (memory(work, Strategy(1, 1, tensor, recompute), CPU).activations for tensor in (4, 8))
    # Of each block the input of attention and that of the feed-forward part, and that of the output layer.
    whole = {"none": 2 * 2, "selective": 2, "full": 0}[recompute] + 1
    assert 2 * eight - four == pytest.approx(whole * width, abs=1024)


def test_loss_over_tensor_ranks_has_three_gradients() -> None:
    work = Work(shape_of("1b", 1), 2048, 2, 1)
    whole, halved = (memory(work, one, CPU).working for one in (Strategy(1, 1), Strategy(1, 1, 2)))
    logits = 4 * work.tokens * work.shape.vocab_size
    assert (whole, halved) == (2 * logits, 3 * logits // 2)


def test_cuda_keeps_less_of_norms_than_the_cpu() -> None:
    work, strategy = Work(shape_of("8b"), 4096, 8, 1, 0, BF16), Strategy(1, 1)
    saved = 4 * work.tokens * work.shape.width * (2 * work.shape.layers + 1)
    assert memory(work, strategy, CPU).activations - memory(work, strategy).activations == saved


def mesh_row(model: str, machine: str, settings: str, tokens: str) -> list[str]:
    """Return what the page shows of a mesh: its memory in GB, and whether that fits."""
    nodes, gpus, gpu_gb = re.fullmatch(r"(?:(\d+) nodes of )?(\d+) GPUs of (\d+) GB", machine).groups()  # type: ignore[union-attr]
    given = {key: int(value) for key, value in re.findall(r"`(\w+) = (\d+)`", settings)}
    shard, tensor = given["shard"], given.get("tensor", 1)
    replicas = int(nodes or 1) * int(gpus) // (shard * tensor)
    count = int(tokens.replace(",", ""))
    offload = "offload" in settings
    work = Work(shape_of(model), count, 64, 1, given.get("loss_chunk", 0), BF16, offload=offload)
    planned = memory(work, Strategy(replicas, shard, tensor, "full"))
    node = replace(node_of("p5.48xlarge"), gpu_bytes=int(gpu_gb) * 10**9)
    assert not offload or f"{planned.host * int(gpus) / 1e9:,.0f} GB of the node's own memory" in PAGE.read_text(
        "utf-8"
    )
    columns = (planned.state, planned.gathered, planned.activations, planned.working, planned.total)
    return [*(f"{count / 1e9:.1f}" for count in columns), "yes" if planned.total <= node.usable_bytes else "no"]


def test_offloaded_states_are_on_the_host_and_no_others() -> None:
    work = Work(shape_of("8b"), 4096, 16, 1, 0, BF16)
    offloaded = replace(work, offload=True)
    there, here = memory(offloaded, Strategy(1, 16)), memory(work, Strategy(1, 16))
    assert (there.host, there.state, here.host) == (here.state, 0, 0)
    assert there.gathered >= here.gathered
    assert memory(offloaded, Strategy(16, 1)) == memory(work, Strategy(16, 1))


def test_replicas_sum_offloaded_gradients_on_the_gpu_over_micro_batches() -> None:
    work = Work(shape_of("8b"), 4096, 16, 1, 0, BF16, offload=True)
    once, twice = (memory(replace(work, global_batch=batch), Strategy(2, 8)) for batch in (16, 32))
    assert (once.gradients, twice.gradients) == (0, 4 * work.parameters // 8)


def test_page_shows_what_each_mesh_takes() -> None:
    text = PAGE.read_text("utf-8").split("### Which mesh")[1].split("###")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| (`\w+`|70B) ", line)]
    assert len(rows) >= 8
    for model, machine, settings, tokens, *shown in rows:
        assert shown == mesh_row(model.strip("`").lower(), machine, settings, tokens)
