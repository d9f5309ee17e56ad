"""What the Prometheus exporter costs a training step, while it is scraped fifteen times as often as by default."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rehearsal.corpus import standard_library_sources
from tests.bench.bench_step import BATCH, CONFIG, SEQ_LEN, our_steps
from tests.bench.harness import Row, interleaved, median, run_bench
from trainer import config as configuration
from trainer.__main__ import main as trainer_main
from trainer.metrics.prometheus import PrometheusSink
from trainer.run.past import Past
from trainer.tasks import make_task
from trainer.train import prepare

RECORDS = 20_000
"""Per round, one after the other: a step's own noise is a thousand times what is measured."""
SCRAPE_S = 1.0
"""Prometheus scrapes every 15 s in its example, and every minute by default
(https://prometheus.io/docs/prometheus/latest/configuration/configuration/)."""


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-metrics-") as name, ExitStack() as leaving:
        folder = Path(name)
        sources = [str(path) for path in standard_library_sources()]
        trainer_main(["tokenize", *sources, "--out", f"{folder}/tokens", "--tokenizer", "train:2048"])
        (folder / "config.toml").write_text(CONFIG.format(folder=folder, batch=BATCH, seq_len=SEQ_LEN))
        config = configuration.load(folder / "config.toml")
        training, _ = prepare(config, make_task(config.task, seed=config.run.seed), leaving, leaving)
        sink = PrometheusSink(run="run", rank=0, launch=1, mfu_per_token=1e-6)
        sink.begin_generation(1)
        sink.set_past(1, Past(time.time() - 3600, 1800.0, 3))
        port = sink.serve("127.0.0.1", 0)
        leaving.callback(sink.close)
        leaving.enter_context(scraping(port))
        found = interleaved({"sink": lambda: sink_seconds(sink), "step": our_steps(training, [])}, repetitions)
    sink_s, step_s = median(found["sink"]), median(found["step"])
    note = f"{sink_s / step_s:.3%}; tiny model, batch {BATCH} x {SEQ_LEN}, {torch.get_num_threads()} threads, a scrape a second"
    row = Row(
        "Prometheus exporter's share of a training step",
        sink_s,
        step_s,
        sink_s / step_s,
        0.001,
        None,
        "s",
        baseline_name="the whole step",
        at_most=True,
        note=note,
    )
    return [row.as_dict()]


def sink_seconds(sink: PrometheusSink) -> float:
    """Mean seconds that one record takes, with what scrapes meanwhile take of this thread's time."""
    record = {"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e4, "step_seconds": 0.1, "world_size": 8}
    record |= {"data_seconds": 0.001, "blocked_seconds": 0.01, "attempt": 1, "tokens": 10**9}
    began = time.perf_counter()
    for step in range(RECORDS):
        sink.step(record | {"step": step})
    return (time.perf_counter() - began) / RECORDS


def scraping(port: int) -> ExitStack:
    """Scrape until the stack is left."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_S):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
                reply.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    leaving = ExitStack()
    leaving.callback(thread.join)
    leaving.callback(over.set)
    return leaving


def main() -> int:
    return run_bench(measure)


if __name__ == "__main__":
    sys.exit(main())
