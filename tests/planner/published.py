"""Figures that others published of their own trainings, and what the planner's laws give for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from node_setup.agent.settings import data
from planner.goodput import Losses, best_interval_s, goodput
from planner.hardware import node_of
from planner.memory import memory
from planner.step import efficiency_of, mfu, step_time
from planner.strategy import Strategy
from planner.work import Work
from tests.planner.fake_training import shape_of
from trainer.config import PrecisionConfig
from trainer.tasks.models.llama import LlamaShape, flops_per_token

BF16 = PrecisionConfig(mode="bf16")
TITAN = "https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "https://github.com/will-thompson-k/torchtitan/blob/main/docs/performance.md"
TRAINY = "https://github.com/pytorch/torchtitan/blob/1af29373a02c4beb237c2de02793931ce53b48d8/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
LLAMA3, MEGASCALE = "https://arxiv.org/abs/2407.21783", "https://arxiv.org/abs/2402.15627"
CARD = "https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md"
SCALING = "https://arxiv.org/abs/2411.13055"

LLAMA_405B = LlamaShape(16_384, 126, 128, 8, 53_248, 128_256, tied=False)
GPT_175B = LlamaShape(12_288, 96, 96, 96, 32_768, 64_000)
"""MegaScale's model; its two matrices of four times the width have the elements of three of 8/3 of it."""
LLAMA2_7B = LlamaShape(4_096, 32, 32, 32, 11_008, 32_000, tied=False)


@dataclass(frozen=True)
class Published:
    """`predict` gives the law's figure for a published one; `within` is the error that docs/plan.md admits."""

    name: str
    source: str
    figure: float
    predict: Callable[[], float]
    within: float

    @property
    def error(self) -> float:
        return self.predict() / self.figure - 1


def _mfu(shape: LlamaShape, seq_len: int, instance_type: str, tokens_per_s_gpu: float) -> Callable[[], float]:
    """MFU from a published number of tokens: the law of operations alone."""
    node = node_of(instance_type)
    work = Work(shape, seq_len, 1, 1, 0, BF16)
    return lambda: mfu(work, node, 1, seq_len / tokens_per_s_gpu)


def _scaled(instance_type: str, micro: int, few: int, many: int, tokens_per_s_gpu: float) -> Callable[[], float]:
    """Tokens a second of a GPU on `many` GPUs, from what was measured on `few`: FSDP of Llama 3 8B, selective."""

    def predict() -> float:
        node, per_gpu = node_of(instance_type), micro * 8192
        work, more = (Work(shape_of("8b"), 8192, micro * gpus, micro, 0, BF16) for gpus in (few, many))
        small, large = (Strategy(1, gpus, recompute="selective") for gpus in (few, many))
        share = efficiency_of(work, small, node, few // node.gpus, per_gpu / tokens_per_s_gpu)
        assert share is not None
        return per_gpu / step_time(more, large, node, many // node.gpus, share).total

    return predict


def _gpu_hours() -> float:
    """Millions of H100-hours of Llama 3 405B: 15.6 T tokens at 400 TFLOP/s a GPU, 90 % of the time."""
    return 15.6e12 * flops_per_token(LLAMA_405B, 8192) / 400e12 / 3600 / 0.9 / 1e6


def _memory(gpus: int) -> Callable[[], float]:
    work = Work(shape_of("8b"), 8192, 2 * gpus, 2, 0, BF16)
    return lambda: memory(work, Strategy(1, gpus, recompute="selective")).total / 2**30


def _goodput() -> float:
    """Of Llama 3 405B: 466 interruptions in 54 days; ten minutes to start again and a minute to commit are assumed."""
    losses = Losses(54 * 86_400 / 466, 600, 1, 60)
    return goodput(best_interval_s(losses), losses)


def _lost_at_scale() -> float:
    """Speed of a GPU in 2,048, beside one in 128: FSDP of a 7 B model, two samples of 4,096 tokens a GPU assumed."""
    node = node_of("p5.48xlarge")
    each = [
        step_time(Work(LLAMA2_7B, 4096, 2 * gpus, 2, 0, BF16), Strategy(1, gpus), node, gpus // 8, 0.45).total
        for gpus in (128, 2048)
    ]
    return each[0] / each[1]


def _bus(instance_type: str, nodes: int, size: int) -> Callable[[], float]:
    def predict() -> float:
        node = node_of(instance_type)
        ranks = node.gpus * nodes
        return 2 * (ranks - 1) / ranks * size / node.reduce_s(size, ranks, nodes) / 1e9

    return predict


def _floors() -> list[Published]:
    """All-reduces that the node checks compare with; their pages stand in `node_setup/settings/floors.toml`."""
    within = {"p4d.24xlarge": 0.06, "p5.48xlarge": 0.02, "p6-b200.48xlarge": 0.12, "p6-b300.48xlarge": 0.3}
    return [
        Published(
            f"all-reduce, {row['nodes']} x {row['types'][-1]}, GB/s",
            "node_setup/settings/floors.toml",
            row["measured_gb_s"],
            _bus(row["types"][0], row["nodes"], row["bytes"]),
            within[row["types"][0]],
        )
        for row in data.tables()["floors"]["floor"]
        if "measured_gb_s" in row
    ]


PUBLISHED = [
    Published("MFU, Llama 3 8B, 64 A100", TITAN_A100, 0.582, _mfu(shape_of("8b"), 8192, "p4de.24xlarge", 2973), 0.06),
    Published("MFU, Llama 3 70B, 64 A100", TITAN_A100, 0.517, _mfu(shape_of("70b"), 8192, "p4de.24xlarge", 331), 0.02),
    Published(
        "MFU, 175B, 12,288 A100", MEGASCALE, 0.552, _mfu(GPT_175B, 2048, "p4de.24xlarge", 1_984_000 / 12_288), 0.02
    ),
    Published("million H100-hours, Llama 3 405B", CARD, 30.84, _gpu_hours, 0.03),
    Published("tokens/s, 8B, 8 to 128 H100", TITAN, 5_605, _scaled("p5.48xlarge", 2, 8, 128, 5_762), 0.03),
    Published("tokens/s, 8B compiled, 8 to 128 H100", TITAN, 6_514, _scaled("p5.48xlarge", 2, 8, 128, 6_667), 0.03),
    Published("tokens/s, 8B, 32 to 64 H200", TRAINY, 10_753, _scaled("p5e.48xlarge", 2, 32, 64, 10_938), 0.02),
    Published("speed of a GPU, 7B, 128 to 2,048 H100 (fitted)", SCALING, 0.628, _lost_at_scale, 0.02),
    Published("GiB, 8B compiled, 8 H100", TITAN, 77.0, _memory(8), 0.08),
    Published("GiB, 8B compiled, 128 H100", TITAN, 62.0, _memory(128), 0.08),
    Published("goodput, Llama 3 405B, 16,384 H100 (over)", LLAMA3, 0.90, _goodput, 0.03),
    *_floors(),
]
