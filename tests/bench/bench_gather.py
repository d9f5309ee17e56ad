"""Batches out of a memory-mapped token set: our gather against nanoGPT's get_batch, and its share of a training step.

Both read 100 million uint16 ids that lie in the page cache. nanoGPT's loop is that of its train.py
(https://github.com/karpathy/nanoGPT/blob/master/train.py, get_batch): per sample one slice, widened and stacked, for inputs and
for targets. Ours returns both as one block in the stored type; the device widens it. The notes say what remains of the lead
when the CPU widens it, and when the order of the samples is computed as well.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from awscrt.checksums import crc64nvme

from tests.bench.harness import Row, interleaved, median, run_bench, timed
from trainer.data.index import INDEX, Index, Shard, Split, encode_index, shard_name
from trainer.data.order import sample_ids
from trainer.data.shards import TokenSet
from trainer.data.tokenizer import ByteTokenizer
from trainer.tasks.models import llama

TOKENS = 100_000_000
SHARD_TOKENS = 32 << 20
"""`tokenize` makes shards of 64 MiB unless told otherwise."""
BATCH, SEQ_LEN = 64, 1024
STEP_BATCH, STEP_SEQ_LEN = 16, 128
"""A step as small as anyone would train: any larger one has a smaller share of data."""
VOCABULARY = 8192
BATCHES = 100
BAR = 20.0
SHARE_BAR = 0.005


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-gather-") as name:
        folder = Path(name)
        write_set(folder)
        tokens = TokenSet.open(name, "train", cache_dir=folder, cache_bytes=0)
        ids = np.random.default_rng(1).integers(0, tokens.windows(SEQ_LEN), (BATCHES, BATCH))
        cases: dict[str, Callable[[], object]] = {
            "gather": lambda: [tokens.gather(batch, SEQ_LEN) for batch in ids],
            "gather and widen": lambda: [torch.from_numpy(tokens.gather(batch, SEQ_LEN)).long() for batch in ids],
            "order and gather": lambda: [ordered(tokens, step, BATCH, SEQ_LEN) for step in range(BATCHES)],
            "nanoGPT": lambda: [nanogpt_batch(folder / "all.bin", BATCH, SEQ_LEN) for _ in range(BATCHES)],
            "small batch": lambda: [ordered(tokens, step, STEP_BATCH, STEP_SEQ_LEN) for step in range(BATCHES)],
        }
        for warm in cases.values():
            warm()
        step = training_step()
        seconds = interleaved(
            {
                **{name: lambda run=run: timed(run) / BATCHES for name, run in cases.items()},
                "step": lambda: timed(step),
            },
            repetitions,
        )
    took = {name: median(values) for name, values in seconds.items()}
    size = BATCH * SEQ_LEN / 1e6
    lead = {name: took["nanoGPT"] / took[name] for name in ("gather", "gather and widen", "order and gather")}
    return [
        Row(
            figure=f"batch of {BATCH} x {SEQ_LEN} tokens from {TOKENS // 10**6}M in 3 shards",
            ours=size / took["gather"],
            baseline=size / took["nanoGPT"],
            ratio=lead["gather"],
            bar=BAR,
            limit=None,
            unit="Mtok/s",
            baseline_name="nanoGPT get_batch",
            note=f"{lead['gather and widen']:.0f}x when the CPU widens to int64, "
            f"{lead['order and gather']:.0f}x with the order computed too",
        ).as_dict(),
        Row(
            figure=f"data share of a step of the tiny model, {STEP_BATCH} x {STEP_SEQ_LEN}",
            ours=took["small batch"] * 1e3,
            baseline=took["step"] * 1e3,
            ratio=took["small batch"] / took["step"],
            bar=SHARE_BAR,
            limit=None,
            unit="ms",
            baseline_name="forward, backward and optimizer",
            at_most=True,
            note=f"order and gather take {took['small batch'] / took['step']:.3%} of the step",
        ).as_dict(),
    ]


def write_set(folder: Path) -> None:
    """A token set of random ids, and the same ids as one file for nanoGPT."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS, dtype=np.uint16)
    ids.tofile(folder / "all.bin")
    shards = []
    for number, start in enumerate(range(0, TOKENS, SHARD_TOKENS)):
        part = ids[start : start + SHARD_TOKENS]
        ends = np.array([part.size], "<i8").tobytes()
        shard = Shard(shard_name("train", number), part.size, 1, crc64nvme(part.tobytes()), crc64nvme(ends))
        part.tofile(folder / shard.tokens_key)
        (folder / shard.ends_key).write_bytes(ends)
        shards.append(shard)
    index = Index("uint16", VOCABULARY, 0, "bytes", ByteTokenizer.hash, {"train": Split(tuple(shards))}, "bench")
    (folder / INDEX).write_bytes(encode_index(index))


def ordered(tokens: TokenSet, step: int, batch: int, seq_len: int) -> np.ndarray:
    return tokens.gather(sample_ids(1, step * batch, batch, tokens.windows(seq_len)), seq_len)


def nanogpt_batch(path: Path, batch: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block, (batch,))
    x = torch.stack([torch.from_numpy((data[i : i + block]).astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block]).astype(np.int64)) for i in starts])
    return x, y


def training_step() -> Callable[[], None]:
    """One step of the smallest shipped model on a batch that is already there."""
    shape = dataclasses.replace(llama.PRESETS["tiny"], vocab_size=VOCABULARY)
    model = llama.build(shape, length=STEP_SEQ_LEN, seed=1, loss_chunk=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(VOCABULARY, (STEP_BATCH, STEP_SEQ_LEN + 1))

    def step() -> None:
        loss = model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    return step


if __name__ == "__main__":
    sys.exit(run_bench(measure))
