"""Number formats, random streams and deterministic kernels: all that decides the bits of a step."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lustrain.problem import UserError, problem
from trainer.config import PrecisionConfig

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[config.mode])


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


def reseed(seed: int, step: int, micro: int) -> None:
    """Seed torch on CPU and GPU for one micro-batch, so that dropout does not depend on which rank computes it."""
    value = stream_seed(seed, step, micro)
    # torch.manual_seed would also note the seed and a formatted stack for every kind of device that is absent: 150 us.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


def seed_streams(seed: int, step: int, rank: int) -> None:
    """Seed this process's streams of Python and NumPy, which a Task may use: a run begins alike each time.

    They go on from there, each rank's own, and a resume on as many ranks puts them back (`restore_rng`); on another number of
    ranks they begin anew at the step that it goes on from.
    """
    value = stream_seed(seed, step, rank)
    random.seed(value)
    np.random.seed(value % 2**32)


def rng_tensors(rank: int) -> dict[str, Tensor]:
    """Return this process's random states as uint8 tensors named own/<rank>/rng/{python,numpy,torch,cuda}."""
    prefix = f"own/{rank}/rng/"
    tensors = {
        f"{prefix}python": _tensor(_encode_python()),
        f"{prefix}numpy": _tensor(_encode_numpy()),
        f"{prefix}torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors[f"{prefix}cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore_rng(tensors: Mapping[str, Tensor], rank: int) -> bool:
    """Put this rank's states back; False, and nothing changed, when they were not saved (the world was another one)."""
    prefix = f"own/{rank}/rng/"
    if not {f"{prefix}python", f"{prefix}numpy", f"{prefix}torch"} <= tensors.keys():
        return False
    try:
        python, numpy = (
            _decode_python(_bytes(tensors[f"{prefix}python"])),
            _decode_numpy(_bytes(tensors[f"{prefix}numpy"])),
        )
    except struct.error as error:
        raise UserError(
            f"{prefix}*: not a random state of this format ({error}); fix: use an older checkpoint"
        ) from error
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(tensors[f"{prefix}torch"].cpu())
    if f"{prefix}cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[f"{prefix}cuda"].cpu())
    return True


_PYTHON = struct.Struct("<I625I?d")
"""random.getstate(): version, the Mersenne Twister's 624 words and position, whether a Gaussian is kept, and that Gaussian."""
_NUMPY = struct.Struct("<624Ii?d")
"""numpy.random.get_state(): 624 words, position, whether a Gaussian is kept, and that Gaussian."""


def _encode_python() -> bytes:
    version, words, gauss = random.getstate()
    return _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)


def _decode_python(raw: bytes) -> tuple[int, tuple[int, ...], float | None]:
    version, *words, kept, gauss = _PYTHON.unpack(raw)
    return version, tuple(words), gauss if kept else None


def _encode_numpy() -> bytes:
    state: Any = np.random.get_state()
    _, words, position, kept, gauss = state
    return _NUMPY.pack(*words.tolist(), position, bool(kept), gauss)


def _decode_numpy(raw: bytes) -> tuple[str, np.ndarray[Any, np.dtype[np.uint32]], int, int, float]:
    *words, position, kept, gauss = _NUMPY.unpack(raw)
    return "MT19937", np.array(words, dtype=np.uint32), position, int(kept), gauss


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
