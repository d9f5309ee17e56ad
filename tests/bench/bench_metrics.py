"""What the Prometheus exporter costs a run: its part of each step, and of the time between two scrapes."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from prometheus_client import generate_latest

from tests.bench.bench_step import BATCH, SEQ_LEN, our_steps, tiny_training
from tests.bench.harness import Row, interleaved, median, run_bench
from trainer.metrics.prometheus import PrometheusSink
from trainer.run.past import Past

RECORDS = 20_000
"""Per round, one after the other: a step's own noise is a thousand times what is measured."""
SCRAPES = 200
SCRAPE_S = 15.0
"""Prometheus's example has this interval, a quarter of its default
(https://prometheus.io/docs/prometheus/latest/configuration/configuration/)."""


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-metrics-") as name, ExitStack() as leaving:
        training = tiny_training(Path(name), leaving)
        sink = PrometheusSink(run="run", rank=0, launch=1, mfu_per_token=1e-6)
        sink.begin_generation(1)
        sink.set_past(1, Past(time.time() - 3600, 1800.0, 3))
        work = {"sink": lambda: sink_seconds(sink), "scrape": lambda: scrape_seconds(sink)}
        found = interleaved({**work, "step": our_steps(training, [])}, repetitions)
    sink_s, scrape_s, step_s = (median(found[name]) for name in ("sink", "scrape", "step"))
    # Text for a scrape is made under Python's lock, in time that a step may lack.
    cost_s = sink_s + scrape_s * step_s / SCRAPE_S
    note = (
        f"{cost_s / step_s:.3%}: {sink_s * 1e6:.0f} us a record, {scrape_s * 1e3:.1f} ms a scrape every {SCRAPE_S:.0f} s; "
        f"tiny model, batch {BATCH} x {SEQ_LEN}, {torch.get_num_threads()} threads"
    )
    row = Row(
        "Prometheus exporter's share of a training step",
        cost_s,
        step_s,
        cost_s / step_s,
        0.001,
        None,
        "s",
        baseline_name="the whole step",
        at_most=True,
        note=note,
    )
    return [row.as_dict()]


def sink_seconds(sink: PrometheusSink) -> float:
    """Mean seconds that one record takes."""
    record = {"loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e4, "step_seconds": 0.1, "world_size": 8}
    record |= {"data_seconds": 0.001, "blocked_seconds": 0.01, "attempt": 1, "tokens": 10**9}
    began = time.perf_counter()
    for step in range(RECORDS):
        sink.step(record | {"step": step})
    return (time.perf_counter() - began) / RECORDS


def scrape_seconds(sink: PrometheusSink) -> float:
    """Mean seconds that the text of one scrape takes; the thread that sends it waits for the network."""
    began = time.perf_counter()
    for _ in range(SCRAPES):
        generate_latest(sink.registry)
    return (time.perf_counter() - began) / SCRAPES


def main() -> int:
    return run_bench(measure)


if __name__ == "__main__":
    sys.exit(main())
