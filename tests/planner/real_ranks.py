"""What torch holds on a real rank while the trainer trains: what the CPU's allocator gives out, as torch's profiler reports it.

Pages of the process would also count the interpreter, its libraries and what the C allocator keeps; these are bytes of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from planner.strategy import Strategy
from planner.work import Work
from tests.fork_server import ForkServer
from tests.trainer.token_sets import write_token_set
from trainer import config as configuration
from trainer.loop import train_step
from trainer.tasks import make_task
from trainer.tasks.models.llama import LlamaShape
from trainer.train import prepare

SHAPE = LlamaShape(256, 4, 8, 4, 704, 4096, tied=True)
"""Weights, activations and logits each have a tenth of the peak or more."""
SEQ_LEN, MICRO_BATCH, MICRO_BATCHES = 256, 4, 2
STEPS = 4
"""The optimizer's state exists from the end of the first on."""
MARK = "lustrain.step"
STRATEGIES = (
    Strategy(1, 1),
    Strategy(1, 1, recompute="full"),
    Strategy(2, 1),
    Strategy(4, 1),
    Strategy(1, 2),
    Strategy(1, 4, recompute="selective"),
    Strategy(2, 2),
    Strategy(1, 1, 2),
    Strategy(1, 1, 2, recompute="selective"),
    Strategy(1, 2, 2),
)
CONFIG = f"""
[task]
name = "language_model"
seq_len = {SEQ_LEN}
[task.model]
width = {SHAPE.width}
layers = {SHAPE.layers}
heads = {SHAPE.heads}
kv_heads = {SHAPE.kv_heads}
hidden = {SHAPE.hidden}
vocab_size = {SHAPE.vocab_size}
tied = true
[train]
steps = 100
micro_batch = {MICRO_BATCH}
grad_clip = 1.0
[checkpoint]
every_steps = 1000
[parallel]
device = "cpu"
"""


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors on one rank: between steps, and the most within one."""

    state: int
    total: int


def label(strategy: Strategy) -> str:
    """Return a strategy's kind, ranks and recomputation, where it has one, in words."""
    recompute = "" if strategy.recompute == "none" else f", {strategy.recompute} recomputation"
    return f"{strategy.kind} on {strategy.gpus}{recompute}"


def work_of(strategy: Strategy) -> Work:
    """Return what `measured_peaks` trains: every data rank adds up two micro-batches."""
    return Work(SHAPE, SEQ_LEN, MICRO_BATCH * MICRO_BATCHES * strategy.data_ranks, MICRO_BATCH)


def measured_peaks(server: ForkServer, folder: Path, strategy: Strategy) -> list[Peak]:
    """Train on real ranks that exchange through gloo; return the peak of each."""
    if not (folder / "tokens").exists():
        write_token_set(folder / "tokens", {"train": bytes(range(256)) * 2048})
    config = folder / "memory.toml"
    config.write_text(CONFIG, encoding="utf-8")
    name = f"{strategy.replicate}-{strategy.shard}-{strategy.tensor}-{strategy.recompute}"
    overrides = (
        f"run.uri={folder}/{name}",
        f"task.data={folder}/tokens",
        f"train.global_batch={work_of(strategy).global_batch}",
        f"train.activation_checkpointing={strategy.recompute}",
        f"parallel.shard={strategy.shard}",
        f"parallel.tensor={strategy.tensor}",
    )
    return server.call(peak_of_rank, strategy.gpus, str(config), overrides)


def peak_of_rank(rank: int, config: str, overrides: Iterable[str]) -> Peak:
    """Train the steps of one rank under the profiler, from before the model is built."""
    loaded = configuration.load(Path(config), list(overrides))
    with ExitStack() as cleanup, ExitStack() as together:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            training = prepare(loaded, make_task(loaded.task, seed=1), cleanup, together)[0]
            for step in range(1, STEPS + 1):
                with torch.profiler.record_function(f"{MARK}{step}"):
                    train_step(training, step)
                training.progress.step = step
        return peak_of(profiled)


def peak_of(profiled: profile) -> Peak:
    """Return the least of what steps begin with and peak at, once the optimizer's state exists.

    A thread of gloo that lets go of the last reference to a buffer is not profiled: the buffer counts on, until its address
    is given out again. So a step can seem to hold more than it does and never less, and steps are alike.
    """
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    pending, allocations, begins = list(results.experimental_event_tree()), [], []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name.startswith(MARK):
            begins.append(event.start_time_ns)
    allocations.sort(key=lambda each: each[0])
    begins.sort()
    live: dict[int, int] = {}
    held, steps = 0, [Peak(0, 0)]
    for at, address, size in allocations:
        if len(steps) <= len(begins) and at >= begins[len(steps) - 1]:
            steps.append(Peak(held, held))
        held -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            held += size
        steps[-1] = Peak(steps[-1].state, max(steps[-1].total, held))
    trained = steps[2:]
    return Peak(min(step.state for step in trained), min(step.total for step in trained))
