"""What torch allocates for a step of the trainer's model, counted on fake tensors: shapes and kernels are real, data are not.

Left out: everything of CUDA. Kernels are those of the CPU, which `planner.memory.CPU` describes, and no allocator rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.strategy import Strategy
from planner.work import Work
from tests.planner.real_ranks import label
from trainer.config import PrecisionConfig
from trainer.parallel.fsdp import mixed_precision, shard_units
from trainer.step.precision import autocast
from trainer.step.recompute import recompute_blocks
from trainer.tasks.models import llama

CPU = torch.device("cpu")
RANKS = 8


@contextmanager
def a_rank_of_eight() -> Iterator[None]:
    """Join a group whose collectives do nothing, so that one process is rank 0 of it."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_model(work: Work, strategy: Strategy) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Yield the model with fake weights, divided as the trainer would, and a micro-batch."""
    model = llama.empty(work.shape, length=work.seq_len, loss_chunk=work.loss_chunk)
    mesh = None
    if strategy.shard > 1:
        sizes, names = (strategy.replicate, strategy.shard), ("replicate", "shard")
        first = int(strategy.replicate == 1)
        mesh = init_device_mesh("cpu", sizes[first:], mesh_dim_names=names[first:])
    with FakeTensorMode():
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(weight.shape)))
            for name, table in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty(table.shape))
        recompute_blocks(list(model.blocks), strategy.recompute)
        if mesh is not None:
            policy = mixed_precision(work.precision)
            blocks, embeddings = list(model.blocks), llama.embeddings(model)
            shard_units(model, blocks, embeddings, mesh=mesh, policy=policy, reshard=work.reshard)
        yield model, torch.empty(work.micro_batch, work.seq_len, dtype=torch.int64)


def peak_bytes(work: Work, strategy: Strategy) -> int:
    """Return the most that is allocated in forward and backward with AdamW's state: of a later micro-batch, with gradients of
    earlier ones, or with replicas of all micro-batches, since FSDP2 then holds those gradients itself."""
    # They bring torch's compilers, a second and a half that every process of the tests would spend.
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    replicas = strategy.shard > 1 and strategy.replicate > 1
    with fake_model(work, strategy) as (model, tokens):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for parameter in model.parameters():
            parameter.grad = None if replicas else torch.empty_like(parameter)
            moments = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        if strategy.shard > 1:
            tracker: Any = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((tokens,))
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer, tokens)
        with tracker:
            for last in (False, True) if replicas else (True,):
                if replicas:
                    model.set_requires_all_reduce(last)  # type: ignore[operator]
                with autocast(work.precision, CPU):
                    loss = model(tokens, tokens)
                loss.backward()
                tracker.reset_mod_stats()
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


def kept_bytes(work: Work) -> int:
    """Return what autograd keeps of a forward pass beside the weights themselves."""
    storages: dict[int, torch.UntypedStorage] = {}
    with fake_model(work, Strategy(1, 1)) as (model, tokens):
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                storages[storage._cdata] = storage
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor), autocast(work.precision, CPU):
            loss = model(tokens, tokens)
        assert loss.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def shape_of(preset: str, layers: int = 0, vocabulary: int = 128_256) -> llama.LlamaShape:
    """Return a preset, or `70b` (https://huggingface.co/meta-llama/Meta-Llama-3-70B), with fewer layers if given."""
    seventy = llama.LlamaShape(8_192, 80, 64, 8, 28_672, tied=False)
    shape = seventy if preset == "70b" else llama.PRESETS[preset]
    return dataclasses.replace(shape, layers=layers or shape.layers, vocab_size=vocabulary)


def _case(
    preset: str,
    layers: int,
    tokens: tuple[int, int],
    vocabulary: int,
    strategy: Strategy,
    mode: str = "bf16",
    chunk: int = 0,
) -> tuple[str, Work, Strategy]:
    batch, length = tokens
    work = Work(shape_of(preset, layers, vocabulary), length, batch * RANKS, batch, chunk, PrecisionConfig(mode=mode))
    loss = f", loss_chunk {chunk}" if chunk else ""
    shape = f"{preset}, {layers} blocks, vocabulary {vocabulary:,}, {batch} x {length:,} tokens"
    return f"{shape}, {mode}{loss}, {label(strategy)}", work, strategy


def admitted_error(work: Work) -> float:
    """Return the share by which a planned peak may miss torch's. Of logits in chunks the plan holds more at once than torch."""
    return 0.1 if work.loss_chunk else 0.025


CASES = (
    _case("llama-124m", 2, (4, 1024), 50_304, Strategy(1, 1)),
    _case("1b", 2, (2, 2048), 1_000, Strategy(1, 1, recompute="full")),
    _case("1b", 2, (2, 2048), 128_256, Strategy(1, 1, recompute="full"), chunk=1024),
    _case("8b", 2, (1, 4096), 128_256, Strategy(1, 1, recompute="selective")),
    _case("1b", 2, (2, 2048), 1_000, Strategy(1, RANKS)),
    _case("1b", 2, (2, 2048), 128_256, Strategy(1, RANKS, recompute="full"), "fp32"),
    _case("8b", 2, (1, 4096), 128_256, Strategy(1, RANKS, recompute="selective")),
    _case("8b", 2, (1, 256), 128_256, Strategy(1, RANKS, recompute="full")),
    _case("8b", 2, (1, 256), 128_256, Strategy(1, RANKS, recompute="full"), "fp32"),
    _case("8b", 2, (1, 256), 128_256, Strategy(2, RANKS // 2, recompute="full")),
    _case("1b", 2, (1, 256), 128_256, Strategy(1, RANKS, recompute="full")),
    _case("1b", 3, (1, 256), 1_000, Strategy(2, RANKS // 2, recompute="full")),
    _case("70b", 2, (1, 8192), 128_256, Strategy(1, RANKS, recompute="full")),
)
"""What each is called, and what it trains how. Few blocks of a large vocabulary, and the other way round, show each part."""
