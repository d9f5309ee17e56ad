"""Run benches, each in a process of its own, and renew their tables in RESULTS.md: `python -m tests.bench [NAME …]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.harness import table
from tests.bench.results import renewed

RESULTS = Path(__file__).with_name("RESULTS.md")
BENCHES = {
    "bench_save": "Saving a checkpoint",
    "bench_upload": "Uploading to S3",
    "bench_restore": "Restoring a checkpoint",
    "bench_tokenize": "Tokenizing",
    "bench_gather": "Gathering batches",
    "bench_step": "The training step",
    "bench_fsdp": "Sharding over two ranks",
    "bench_shards": "Checkpoints of 1,024 ranks",
    "bench_metrics": "Metrics for Prometheus",
    "bench_alerts": "From a fault to its alert",
    "bench_plan": "Planning a cluster",
    "bench_planner": "Plans of a training beside what is measured",
    "bench_preview": "Previewing a cluster under the engine",
    "bench_nodes": "Tuning nodes",
    "bench_images": "Building images",
    "bench_silence": "Losing a node",
    "bench_launch": "Starting a run on Slurm, and again after a lost node",
    "bench_status": "States of a hundred runs",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHES)}; default: all")
    names = parser.parse_args(argv).names or list(BENCHES)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        parser.error(f"no such bench: {', '.join(unknown)}; allowed: {', '.join(BENCHES)}")
    short: list[str] = []
    for number, name in enumerate(names, 1):
        print(f"── {number}/{len(names)} {BENCHES[name]}", flush=True)
        found = run(name)
        print(table(found["rows"]), flush=True)
        text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
        RESULTS.write_text(renewed(text, BENCHES[name], found, list(BENCHES.values())), encoding="utf-8")
        short += [row["figure"] for row in found["rows"] if not row["holds"]]
    print(f"written: {RESULTS}")
    print(f"falls short: {'; '.join(short)}" if short else "every bar holds")
    return 1 if short else 0


def run(name: str) -> dict[str, Any]:
    """One bench's machine and rows; its own progress goes to the screen."""
    command = [sys.executable, "-m", f"tests.bench.{name}", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    start = done.stdout.find('{\n "machine"')
    if start < 0:
        raise RuntimeError(f"{name} ended with exit code {done.returncode} and no result: {done.stdout[-500:]}")
    return dict(json.loads(done.stdout[start:]))


if __name__ == "__main__":
    sys.exit(main())
