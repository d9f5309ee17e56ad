"""Number formats, random streams and deterministic kernels: all that decides the bits of a step."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from lustrain.problem import problem
from trainer.config import PrecisionConfig

MASK = (1 << 64) - 1
LEAST_SCALE = 1e-4
"""A loss scale below it helps no gradient any more, and each step is skipped: fairseq's --min-loss-scale
(https://fairseq.readthedocs.io/en/latest/command_line_tools.html)."""


def problems(config: PrecisionConfig, device: torch.device) -> Sequence[str]:
    """Return one line for each setting that this device cannot compute with."""
    lines = []
    if device.type == "cuda" and config.mode == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        why = f"{torch.cuda.get_device_name(device)} has no bf16 arithmetic"
        lines.append(problem("precision.mode", config.mode, why, allowed="fp16, fp32", fix='precision.mode = "fp16"'))
    if config.mode == "fp32" and config.matmul == "medium" and device.type == "cuda":
        why = "medium is the same as high on CUDA"
        lines.append(
            problem("precision.matmul", config.matmul, why, allowed="highest, high", fix='precision.matmul = "high"')
        )
    return lines


def autocast(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context for forward passes; weights, gradients and optimizer state stay fp32 in every mode."""
    if config.mode == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.dtype))


def make_scaler(config: PrecisionConfig, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler, enabled for fp16 only: bf16 has fp32's range and needs none."""
    return torch.amp.GradScaler(device.type, init_scale=config.fp16_initial_scale, enabled=config.mode == "fp16")


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, float | int]:
    """Return the scaler as JSON values that come back bit for bit; {} when it is not enabled."""
    return dict(scaler.state_dict())


def load_scaler(scaler: torch.amp.GradScaler, state: Mapping[str, float | int]) -> None:
    """Continue where `scaler_state` was taken; after a run without fp16, or with a scale of no use, the fresh one stays."""
    if scaler.is_enabled() and state and state["scale"] >= LEAST_SCALE:
        scaler.load_state_dict(dict(state))


@contextmanager
def matmul_policy(config: PrecisionConfig) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 matrix products as configured, and put the former policy back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(config.matmul)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only deterministic kernels while it lasts; must be entered before the first CUDA call, which reads the environment."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility: without a fixed workspace cuBLAS may split sums differently.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def splitmix64(value: int) -> int:
    """One step of splitmix64 (https://prng.di.unimi.it/splitmix64.c): a bijection of 64 bits that mixes well."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def stream_seed(seed: int, *path: int) -> int:
    """Return the 64-bit seed of a random stream, e.g. (run seed, step, micro-batch); any change of the path changes all."""
    for part in path:
        seed = splitmix64(seed & MASK) ^ (part & MASK)
    return splitmix64(seed)


def seed_streams(seed: int, step: int, micro_batch: int) -> None:
    """Seed torch (CPU and GPU), Python's `random` and NumPy for one micro-batch, counted over all ranks of its step.

    What a Task or dropout draws after it does not depend on which rank computes the micro-batch. It takes about 10 us.
    """
    value = stream_seed(seed, step, micro_batch)
    random.seed(value)
    np.random.seed(value % 2**32)
    # torch.manual_seed would also note the seed and a formatted stack for every kind of device that is absent: 150 us.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)
