"""From a node's silence to the end of its peers' ranks: our launchers beat, torchrun's ranks wait for a time-out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.harness import Row, interleaved, median, run_bench
from tests.ports import own_port
from tests.processes import alive, children_of, wait_until
from tests.trainer.test_node_local import descendants, end, endless
from trainer.checkpoint.lineage.lease import committed
from trainer.node.heartbeat import SILENT_S
from trainer.storage import open_store

TIMEOUT_S = 30
"""`parallel.timeout_s` on both sides: with its default of 600 s a round of torchrun would take ten minutes."""
BAR_S = 7.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def ours(node: int, port: int, words: list[str]) -> list[str]:
    flags = ["--nnodes", "2", "--node-rank", str(node), "--master", f"127.0.0.1:{port}", "--nproc", "1"]
    return [sys.executable, "-m", "trainer.node.launcher", *flags, "--", *words]


def torchrun(node: int, port: int, words: list[str]) -> list[str]:
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=bench", "--max-restarts=0"]
    there = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *there, "-m", "trainer", *words]


def until_ended(command: Callable[[int, int, list[str]], list[str]]) -> float:
    """Seconds from the silence of node 1, whose processes stand still, to the end of node 0's rank."""
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-silence-") as name:
        folder, port = Path(name), own_port(2)
        sets = [f"parallel.timeout_s={TIMEOUT_S}", "checkpoint.every_steps=20"]
        words = ["train", str(endless(folder)), *(word for one in sets for word in ("--set", one))]
        jobs = [
            subprocess.Popen(
                command(node, port, words),
                env={**os.environ, **ENVIRONMENT},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for node in range(2)
        ]
        try:
            wait_until(lambda: committed(open_store(f"{folder}/run")))
            ranks = children_of(jobs[0].pid)
            for pid in (jobs[1].pid, *descendants(jobs[1].pid)):
                os.kill(pid, signal.SIGSTOP)
            began = time.perf_counter()
            wait_until(lambda: not any(map(alive, ranks)), 10 * TIMEOUT_S)
            return time.perf_counter() - began
        finally:
            for job in jobs:
                end([*descendants(job.pid), job.pid])
                job.wait()


def measure(repetitions: int = 3) -> list[dict[str, Any]]:
    found = interleaved({"ours": lambda: until_ended(ours), "torchrun": lambda: until_ended(torchrun)}, repetitions)
    mine, theirs = median(found["ours"]), median(found["torchrun"])
    row = Row(
        figure="a node falls silent -> its peers' ranks have ended",
        ours=mine,
        baseline=theirs,
        ratio=mine / theirs,
        bar=BAR_S / theirs,
        limit=SILENT_S,
        unit="s",
        baseline_name=f"torchrun c10d, time-out {TIMEOUT_S} s",
        limit_name="the silence that counts",
        at_most=True,
        note=f"bar {BAR_S:g} s; the default of parallel.timeout_s is 600 s",
    )
    return [row.as_dict()]


if __name__ == "__main__":
    sys.exit(run_bench(measure))
