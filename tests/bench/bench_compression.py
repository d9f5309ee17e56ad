"""What the `planes-zstd` codec saves and costs on the state of a really trained small model (weights and both moments)."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.harness import Row, interleaved, median, run_bench, timed
from trainer.checkpoint.codec import decode_block, encode_block
from trainer.checkpoint.format.records import BLOCK_BYTES
from trainer.models import llama

STEPS = 100
BATCH, LENGTH = 8, 64
THREADS = 2
SHAPE = dataclasses.replace(llama.PRESETS["tiny"], width=256, hidden=768, vocab_size=256)


def trained_state(steps: int) -> list[bytes]:
    """fp32 weights, first moments and second moments after `steps` AdamW steps on the bytes of Python's standard library."""
    text = np.concatenate(
        [np.frombuffer(p.read_bytes(), np.uint8) for p in sorted(Path(os.__file__).parent.glob("*.py"))]
    )
    model = llama.build(SHAPE, length=LENGTH, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    random = np.random.default_rng(1)
    for step in range(steps):
        starts = random.integers(0, len(text) - LENGTH - 1, BATCH)
        tokens = torch.from_numpy(text[starts[:, None] + np.arange(LENGTH + 1)]).long()
        loss = model(tokens[:, :-1], tokens[:, 1:]) / (BATCH * LENGTH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    groups: list[list[torch.Tensor]] = [[], [], []]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for group, tensor in zip(groups, (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True):
            group.append(tensor.reshape(-1))
    return [torch.cat(group).numpy().tobytes() for group in groups]


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    torch.set_num_threads(THREADS)
    kinds = dict(zip(("weights", "first moments", "second moments"), trained_state(STEPS), strict=True))
    everything = b"".join(kinds.values())
    blocks = [everything[at : at + BLOCK_BYTES] for at in range(0, len(everything), BLOCK_BYTES)]
    encoded = [encode_block(block) for block in blocks]
    sizes = [len(block) for block in blocks]
    if any(decode_block(code, size) != block for code, size, block in zip(encoded, sizes, blocks, strict=True)):
        raise AssertionError("the codec is no bijection")
    with ThreadPoolExecutor(THREADS) as pool:
        cases: dict[str, Callable[[], float]] = {
            "encode": lambda: timed(lambda: list(pool.map(encode_block, blocks))),
            "decode": lambda: timed(lambda: list(pool.map(decode_block, encoded, sizes))),
        }
        found = interleaved(cases, repetitions)
    shares = ", ".join(f"{name} {len(encode_block(data)) / len(data):.3f}" for name, data in kinds.items())
    speeds = ", ".join(f"{name} {len(everything) / median(found[name]) / 1e6:.0f} MB/s" for name in cases)
    stored, plain = sum(map(len, encoded)), len(everything)
    row = Row(
        figure=f"planes-zstd on {plain / 1e6:.0f} MB of a trained model's state",
        ours=stored / 1e6,
        baseline=plain / 1e6,
        ratio=stored / plain,
        bar=0.95,
        limit=None,
        unit="MB",
        baseline_name="uncompressed",
        at_most=True,
        note=f"{shares} of the size; {speeds} with {THREADS} threads",
    )
    return [row.as_dict()]


if __name__ == "__main__":
    sys.exit(run_bench(measure))
