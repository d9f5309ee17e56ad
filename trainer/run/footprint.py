"""The least memory that a training takes, compared with what the machine has before any of it is allocated.

Without this, a model or a micro-batch far larger than the machine is minutes of silence and then a kill by the kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from lustrain.problem import UserError, problem
from lustrain.progress import BYTES, amount_text
from trainer.config import Config
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE
from trainer.memory import Memory, gpu_memory, host_memory
from trainer.parallel import World
from trainer.parallel.mesh import ParallelDims
from trainer.tasks import Footprint

TRAINED_BYTES = 16
"""Per parameter: fp32 weight, gradient and AdamW's two moments (https://arxiv.org/abs/1910.02054, section 3.1, all in fp32)."""
GRADIENT_BYTES = 4
"""Of these: there is none while a step's first micro-batch goes forward, unless DDP has its buckets."""
BUILT_BYTES = 4
"""Per parameter: each rank makes the model on the CPU in fp32 where it holds all of it, or the Task has no `empty_model`."""


class NoMemoryError(UserError):
    """Memory ran out; what is committed is intact."""

    exit_code = EXIT_FAILURE
    everywhere = True


def check_memory(
    config: Config,
    need: Footprint | None,
    world: World,
    environ: Mapping[str, str] = os.environ,
    *,
    built_whole: bool = True,
) -> None:
    """UserError when the training cannot fit: exit code 2 where it never can, 1 where others hold the memory now.

    `need` None: the Task does not know, and nothing is checked. `built_whole`: the Task cannot make an empty model to shard.
    """
    if need is None:
        return
    ranks = ranks_here(world.world_size, environ)
    host, gpu = host_memory(), gpu_memory(world.device)
    dims = ParallelDims.of(config.parallel, world)
    # Blocks that are gathered to compute with come on top.
    trained = TRAINED_BYTES / dims.replica_size
    has_buckets = dims.replica_size == 1 and world.world_size > 1
    keeps_gradients = has_buckets or config.train.micro_batches > dims.data_size
    beside = trained if keeps_gradients else trained - GRADIENT_BYTES / dims.replica_size
    built = BUILT_BYTES if dims.replica_size == 1 or built_whole else 0
    activations = need.activations // dims.tensor
    if gpu is None:
        _require(config, need, host, trained, beside, activations, ranks)
    elif config.parallel.states_on_host:
        on_host = max(built, trained)
        _require(config, need, host, on_host, on_host, 0, ranks)
        _require(config, need, gpu, 0, 0, activations, 1)
    else:
        _require(config, need, host, built, built, 0, ranks)
        _require(config, need, gpu, trained, beside, activations, 1)


def ranks_here(world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks on this node: torchrun says it, else Slurm does, e.g. `8(x2),4` (https://slurm.schedmd.com/srun.html); else 1."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if count := re.match(r"\d+", environ.get(name, "")):
            return min(int(count[0]), world_size)
    return 1


def _require(
    config: Config,
    need: Footprint,
    memory: Memory | None,
    per_parameter: float,
    beside_activations: float,
    activations: int,
    ranks: int,
) -> None:
    """`per_parameter` are the most bytes without activations, `beside_activations` those that exist together with these."""
    if memory is None:
        return
    model = int(need.parameters * per_parameter * ranks)
    beside = int(need.parameters * beside_activations * ranks)
    needed = max(model, beside + activations * ranks)
    if needed <= min(memory.free, memory.total):
        return
    limit = memory.total if needed > memory.total else memory.free
    shared = f" for {ranks} ranks" if ranks > 1 else ""
    has = f"{memory.name} has {amount_text(memory.total, BYTES)}, of which {amount_text(memory.free, BYTES)} are free"
    if model > limit:
        why = f"the model takes at least {amount_text(model, BYTES)}{shared}, {has}"
        line = problem(
            f"{need.model_keys} (parameters)", need.parameters, why, fix="a smaller model, or a larger machine"
        )
    else:
        micro = config.train.micro_batch
        fits = (limit - beside) * micro // (activations * ranks)
        why = f"model and micro-batch take at least {amount_text(needed, BYTES)}{shared}, {has}"
        allowed = f"<= {fits}" if fits else ""
        line = problem("train.micro_batch", micro, why, allowed=allowed, fix=f"lower it, or {need.remedy}")
    raise UserError(line, EXIT_CONFIG if needed > memory.total else EXIT_FAILURE)


@contextmanager
def report_lack_of_memory() -> Iterator[None]:
    """Turn the various errors of an allocation that failed into a NoMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
        raise NoMemoryError(
            f"memory ran out ({reason}); what is committed is intact; "
            "fix: lower train.micro_batch, set train.activation_checkpointing, or choose a smaller model"
        ) from error
