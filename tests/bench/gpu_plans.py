"""A 1.3B Llama in bf16 on one GPU: its peak beside the planner's, and its step beside plain FSDP2 calls. Needs a GPU.

`make bench-gpu ONLY=plans DRY=1` prints what would run and the planned memory, on any machine. With one GPU nothing crosses a
link: what is compared is memory, kernels and what our machinery adds to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lustrain.progress import BYTES, amount_text
from planner.memory import memory
from planner.strategy import Strategy
from planner.work import Recompute, Work
from tests.bench.harness import Row, interleaved, median, timed
from tests.sharded import LlamaSource
from trainer.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from trainer.parallel.fsdp import Sharded, move_buffers
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.world import World, backends
from trainer.step import optim, precision, recompute
from trainer.tasks.models import llama

BF16 = PrecisionConfig(mode="bf16")
SHAPE = llama.LlamaShape(width=2048, layers=24, heads=16, kv_heads=16, hidden=5504, vocab_size=32_000, tied=False)
"""GPT-3 XL's width and depth (https://arxiv.org/abs/2005.14165, table 2.1), with a Llama's feed-forward and vocabulary."""
SEQ_LEN, MICRO_BATCH, MICRO_BATCHES = 2048, 4, 2
"""The planned peak is that of a later micro-batch, beside the gradients of earlier ones."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
STEPS, WARM_UP = 5, 3
"""Steps a round and side, and those before the first round."""
SPEED, PEAK = 0.95, 1.05
"""The least speed beside plain calls, and the most memory beside what is planned."""


@dataclass(frozen=True)
class OneRankFsdp(Strategy):
    """FSDP2 with one shard, for which the trainer takes no FSDP2: a GPU that gathers from itself."""

    @property
    def uses_fsdp(self) -> bool:
        return True


class InitialisedLlama(LlamaSource):
    """A Llama of this work, with its first weights."""

    def __init__(self, work: Work) -> None:
        super().__init__(work.shape, work.seq_len)

    def initialise(self, model: Any) -> None:
        model.initialise(1)


def works() -> list[tuple[Work, Strategy]]:
    """Return what is measured, with the strategy as the planner describes it."""
    work = Work(SHAPE, SEQ_LEN, MICRO_BATCHES * MICRO_BATCH, MICRO_BATCH, precision=BF16)
    plans: list[tuple[Work, Strategy]] = [(work, OneRankFsdp(1, 1, recompute=each)) for each in RECOMPUTE]
    return [*plans, (replace(work, offload=True), OneRankFsdp(1, 1, recompute="full"))]


def plan_lines(plans: Sequence[tuple[Work, Strategy]]) -> Iterator[str]:
    """Yield what would run, and the memory that the planner expects of it."""
    for work, strategy in plans:
        planned = memory(work, strategy)
        parts = {"states": planned.state, "gathered": planned.gathered, "activations": planned.activations}
        shown = ", ".join(
            f"{name} {amount_text(size, BYTES)}" for name, size in {**parts, "working": planned.working}.items()
        )
        batches = f"{work.micro_batches} micro-batches of {work.micro_batch} x {work.seq_len} tokens"
        yield (
            f"{work.parameters / 1e9:.2f}B parameters, {batches}, {work.precision.mode}, FSDP2 on one GPU, recompute "
            f"{strategy.recompute}{', states offloaded' if work.offload else ''}: "
            f"{amount_text(planned.total, BYTES)} at the peak ({shown})"
        )


def measure(plans: Sequence[tuple[Work, Strategy]], repetitions: int = 5) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one plan after another, measured on the first GPU, or without memory on the CPU where there is none."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with one_rank(device):
        for work, strategy in plans:
            yield [row.as_dict() for row in measure_plan(work, strategy, device, repetitions)]


def measure_plan(work: Work, strategy: Strategy, device: torch.device, repetitions: int) -> list[Row]:
    tokens = torch.randint(work.shape.vocab_size, (work.micro_batch, work.seq_len + 1), device=device)
    label = f"{work.parameters / 1e9:.2f}B, recompute {strategy.recompute}{', offload' if work.offload else ''}"
    rows = []
    # FSDP2's modules refer to one another: without this the models of the plan before count in this one's peak.
    gc.collect()
    ours = our_step(work, strategy, device, tokens)
    if device.type == "cuda":
        # The first step makes the optimizer's state, which belongs to the peak of every later one.
        ours()
        torch.cuda.reset_peak_memory_stats(device)
        ours()
        peak, planned = torch.cuda.max_memory_allocated(device) / 2**30, memory(work, strategy).total / 2**30
        rows.append(
            Row(f"peak memory, {label}", peak, planned, peak / planned, PEAK, None, "GiB", "planned", at_most=True)
        )
    sides = {"ours": ours, "plain": plain_step(work, strategy, device, tokens)}

    def seconds(step: Callable[[], None]) -> float:
        def steps() -> None:
            for _ in range(STEPS):
                step()
            synchronize(device)

        synchronize(device)
        return timed(steps) / STEPS

    for step in sides.values():
        for _ in range(WARM_UP):
            step()
    measured = interleaved({name: lambda step=step: seconds(step) for name, step in sides.items()}, repetitions)
    mine, plain = median(measured["ours"]), median(measured["plain"])
    tokens_per_s = work.tokens_per_step / mine
    note = f"{tokens_per_s:.0f} tokens/s, {tokens_per_s * work.flops_per_token / 1e12:.1f} TFLOP/s on {device}"
    rows.append(
        Row(f"step, {label}", mine, plain, plain / mine, SPEED, None, "s", "fully_shard in a plain loop", note=note)
    )
    return rows


def our_step(work: Work, strategy: Strategy, device: torch.device, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a step of a model that the trainer's parts have made."""
    world = World(0, 1, 0, device, HashStore())
    config = ParallelConfig(offload="states" if work.offload else "none")
    sharded, source = Sharded(config, work.precision, world, ParallelDims(1, 1, 0)), InitialisedLlama(work)
    model = sharded.build(source)
    recompute.recompute_blocks(source.blocks(model), strategy.recompute)
    wrapped = sharded.wrap(model, source)
    optimizer = optim.make_optimizer(model, OptimizerConfig())
    scaler = precision.make_scaler(work.precision, device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for number in range(1, work.micro_batches + 1):
            with sharded.micro_batch(last=number == work.micro_batches):
                with precision.autocast(work.precision, device):
                    loss = wrapped(tokens[:, :-1], tokens[:, 1:])
                scaler.scale(loss / work.tokens_per_step).backward()
        scaler.unscale_(optimizer)
        optim.clip_(list(model.parameters()), 1.0, scale=1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def plain_step(work: Work, strategy: Strategy, device: torch.device, tokens: torch.Tensor) -> Callable[[], None]:
    """torchtitan's order of calls (https://github.com/pytorch/torchtitan) on the same model: bf16 by FSDP2, no autocast.

    FSDP2 would by itself round the tables of rotary embedding to bf16, which is 6 % faster and another model; torchtitan's
    rotate in fp32 too.
    """
    source = InitialisedLlama(work)
    model = source.empty_model()
    recompute.recompute_blocks(source.blocks(model), strategy.recompute)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if work.offload else OffloadPolicy()
    for unit in (model.embed, *model.blocks):
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    model.to_empty(device="cpu" if work.offload else device)
    source.initialise(model)
    move_buffers(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(work.micro_batches):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / work.tokens_per_step
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Be a job of one rank, in a process group of the device's backend."""
    backend = backends(device, ParallelConfig(offload="states"))
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
