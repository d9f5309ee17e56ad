"""A training step through all of our machinery against the same model in a plain minimal loop: nothing may be lost to it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from rehearsal.corpus import standard_library_sources
from tests.bench.harness import Row, interleaved, median, run_bench
from trainer import config as configuration
from trainer.__main__ import main as trainer_main
from trainer.loop import Training, train_step
from trainer.tasks import make_task
from trainer.tasks.language_model import LanguageModel
from trainer.train import prepare

STEPS = 10
"""Per round and side; the median over the rounds of the mean step."""
BATCH, SEQ_LEN = 16, 128
CONFIG = """
[run]
uri = "{folder}/run"
[task]
name = "language_model"
data = "{folder}/tokens"
seq_len = {seq_len}
[task.model]
preset = "tiny"
[train]
steps = 100000
global_batch = {batch}
micro_batch = {batch}
[checkpoint]
every_steps = 100000
"""


def tiny_training(folder: Path, leaving: ExitStack) -> Training:
    """Prepare the training of a tiny model on text that is tokenized into `folder`."""
    sources = [str(path) for path in standard_library_sources()]
    trainer_main(["tokenize", *sources, "--out", f"{folder}/tokens", "--tokenizer", "train:2048"])
    (folder / "config.toml").write_text(CONFIG.format(folder=folder, batch=BATCH, seq_len=SEQ_LEN))
    config = configuration.load(folder / "config.toml")
    return prepare(config, make_task(config.task, seed=config.run.seed), leaving, leaving)[0]


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-step-") as name, ExitStack() as leaving:
        training = tiny_training(Path(name), leaving)
        data_share: list[float] = []
        found = interleaved(
            {"ours": our_steps(training, data_share), "plain": plain_steps(training)}, max(repetitions, 9)
        )
    ours, plain = median(found["ours"]), median(found["plain"])
    shape = f"tiny model, batch {BATCH} x {SEQ_LEN}, fp32, {torch.get_num_threads()} threads"
    rows = [
        Row(
            "training step on the CPU",
            ours,
            plain,
            plain / ours,
            1.0,
            None,
            "s",
            baseline_name="plain loop",
            note=shape,
        ),
        Row(
            "data share of that step",
            median(data_share),
            1.0,
            median(data_share),
            0.005,
            None,
            "",
            baseline_name="the whole step",
            at_most=True,
        ),
    ]
    return [row.as_dict() for row in rows]


def our_steps(training: Training, data_share: list[float]) -> Callable[[], float]:
    def steps() -> float:
        began = time.perf_counter()
        data_seconds = 0.0
        for _ in range(STEPS):
            record, agreed = train_step(training, training.progress.step + 1)
            seconds = time.perf_counter() - began
            rates = {"step_seconds": seconds, "tokens_per_second": agreed.count / seconds, "blocked_seconds": 0.0}
            training.sink.step(record | rates)
            data_seconds += record["data_seconds"]
        mean = (time.perf_counter() - began) / STEPS
        data_share.append(data_seconds / STEPS / mean)
        return mean

    return steps


def plain_steps(training: Training) -> Callable[[], float]:
    """nanoGPT's loop (https://github.com/karpathy/nanoGPT/blob/master/train.py) around the same model, optimizer and data."""
    task = training.task
    assert isinstance(task, LanguageModel)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = np.concatenate([task.train_batch(np.arange(512))["tokens"].numpy().reshape(-1)])

    def steps() -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            places = torch.randint(len(tokens) - SEQ_LEN - 1, (BATCH,))
            x = torch.stack([torch.from_numpy(tokens[i : i + SEQ_LEN].astype(np.int64)) for i in places])
            y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + SEQ_LEN].astype(np.int64)) for i in places])
            optimizer.zero_grad(set_to_none=True)
            logits = model(x)
            loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()
        return (time.perf_counter() - began) / STEPS

    return steps


def main() -> int:
    return run_bench(measure)


if __name__ == "__main__":
    sys.exit(main())
