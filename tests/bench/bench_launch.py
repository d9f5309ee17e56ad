"""Starting a run on Slurm, and going on after a lost node: ours against a job of `true`, Slurm itself, submitit and torchx.

The Slurm is real, on nodes of a lab; all cases use the same one, without accounting. torchx's docs ask for that
(https://docs.pytorch.org/torchx/main/schedulers/slurm.html), but only its states of jobs come from `sacct`: to start one, its
runner calls `sbatch`. It has an environment of its own, since torchx 0.7 wants a urllib3 below 1.27.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rehearsal.lab import slurm as lab_slurm
from rehearsal.lab.node import Node
from rehearsal.lab.nodes import Lab, why_not
from rehearsal.lab.slurm import CPUS, SHARED, Slurm
from tests.bench.harness import Row, interleaved, median, run_bench
from tests.bench.peers import environment
from tests.lab.training import ROOT
from tests.launch.test_launch_slurm import Place
from tests.processes import wait_until
from trainer.node.heartbeat import SILENT_S

WORK = Path(__file__).with_name(".work")
TORCHX_REQUIREMENT = "torchx==0.7.*"
WORKERS = 3
START_BAR_S = 3.0
RESTART_BAR_S = 2.0
STEP_BAR_S = 15.0
RANK = "^[^ ]+ -m trainer train "
MOST_LOSSES = 3
"""Repetitions with a lost node: each takes a minute."""
MARK = "mark"
JOB_OF_TRUE = f"#!/bin/sh\nsrun sh -c 'true && touch {SHARED}/{MARK}.0.$SLURMD_NODENAME'\n"
SUBMITIT = f"""
import os
import sys
import time
from pathlib import Path

import submitit


class Work(submitit.helpers.Checkpointable):
    def __call__(self, seconds):
        start = os.environ.get("SLURM_RESTART_COUNT", "0")
        Path(f"{SHARED}/{MARK}.{{start}}.{{os.environ['SLURMD_NODENAME']}}").touch()
        time.sleep(seconds)


executor = submitit.AutoExecutor(folder="{SHARED}/submitit", cluster="slurm", slurm_python="{sys.executable}")
executor.update_parameters(
    nodes=int(sys.argv[1]), tasks_per_node=1, timeout_min=60, slurm_partition="train",
    slurm_additional_parameters={{"exclusive": True, "requeue": True}},
)
print(executor.submit(Work(), int(sys.argv[2])).job_id)
"""
TORCHX_WORKER = f"""
import os
import sys
import time
from pathlib import Path

start = os.environ.get("SLURM_RESTART_COUNT", "0")
Path(f"{SHARED}/{MARK}.{{start}}.{{os.environ['SLURMD_NODENAME']}}").touch()
time.sleep(int(sys.argv[1]))
"""
TORCHX = f"""
import sys

from torchx.runner import get_runner

words = ["-j", sys.argv[1] + "x1", "--cpu", "{CPUS}", "--script", "{SHARED}/worker.py", "--", sys.argv[2]]
with get_runner() as runner:
    print(runner.run_component("dist.ddp", words, "slurm", {{"partition": "train"}}))
"""
"""A torchrun on each node, which torchx gives a part of a heterogeneous job; all cores, so that no two share a node. Slurm
requeues the job, for which torchx asks."""


class Bench(Place):
    """All cases on one Slurm."""

    def __init__(self, lab: Lab, slurm: Slurm, torchx: Path) -> None:
        super().__init__(lab, slurm)
        self.lost: dict[str, list[float]] = {"first step": [], "detected": []}
        self.torchx = torchx
        for name, text in {"submit.py": SUBMITIT, "with_torchx.py": TORCHX, "worker.py": TORCHX_WORKER}.items():
            (lab.shared / name).write_text(text)

    def start_of_true(self) -> float:
        """Seconds until a step of a job runs on all nodes."""
        began = time.perf_counter()
        self.slurm.submit(JOB_OF_TRUE, f"--nodes={WORKERS}", "--ntasks-per-node=1", "--exclusive")
        _wait(lambda: self._marks(WORKERS))
        return self._cleaned(time.perf_counter() - began)

    def start_of_ours(self) -> float:
        """Seconds until `fab train` has a rank on each node."""
        began = time.perf_counter()
        self.train("--nodes", str(WORKERS), *self._endless(WORKERS))
        _wait(lambda: len(self._ranks()) == WORKERS)
        return self._cleaned(time.perf_counter() - began)

    def start_of_submitit(self) -> float:
        """Seconds until a function that submitit has submitted runs on each node."""
        return self._start_of(self._submitit(WORKERS))

    def start_of_torchx(self) -> float:
        """Seconds until a worker of torchx's `dist.ddp` runs on each node."""
        return self._start_of(self._torchx(WORKERS))

    def restart_of_ours(self) -> float:
        """Seconds from the loss of a node until the run has ranks on others; notes Slurm's detection and the first step."""
        job = self.train("--nodes", "2", "--spare", "1", *self._endless(2))
        self.committed()
        head, (first,) = self.slurm.job(job)["BatchHost"], self.records()
        victim = next(name for name in first["nodes"] if name != head)
        began, unix, seen = time.perf_counter(), time.time(), dict[str, float]()
        self.lab[victim].crash()

        def both() -> bool:
            if "ranks" not in seen and len(self.records()) == 2 and len(self._ranks()) == 2:
                seen["ranks"] = time.perf_counter() - began
            if "down" not in seen and self.slurm.states().get(victim, "").startswith("down"):
                seen["down"] = time.perf_counter() - began
            return len(seen) == 2

        _wait(both)
        # The second launch is the run's second generation.
        _wait(lambda: list((self.run / "manifests").glob("000002-*.json")))
        self.fab("stop", "run")
        _wait(lambda: "ended" in self.records()[-1])
        second = self.records()[1]
        self.lost["first step"].append(second["started"] + second["start_s"] - unix)
        self.lost["detected"].append(seen["down"])
        self.lab[victim].boot()
        return self._cleaned(seen["ranks"])

    def restart_of_submitit(self) -> float:
        """Seconds from the loss of a node until the function runs on others: Slurm requeues the job."""
        return self._restart_of(self._submitit(2))

    def restart_of_torchx(self) -> float:
        """Seconds from the loss of a node until workers run on others: Slurm requeues the job here too."""
        return self._restart_of(self._torchx(2))

    def _start_of(self, submit: Sequence[str]) -> float:
        began = time.perf_counter()
        self._submit(submit)
        _wait(lambda: self._marks(WORKERS))
        return self._cleaned(time.perf_counter() - began)

    def _restart_of(self, submit: Sequence[str]) -> float:
        self._submit(submit)
        _wait(lambda: self._marks(2))
        victim = self._mark_names()[-1].rpartition(".")[2]
        began = time.perf_counter()
        self.lab[victim].crash()
        _wait(lambda: sum(not name.startswith(f"{MARK}.0.") for name in self._mark_names()) == 2)
        took = time.perf_counter() - began
        self.lab[victim].boot()
        return self._cleaned(took)

    def _endless(self, ranks: int) -> Sequence[str]:
        sets = {"train.steps": 10**6, "train.global_batch": 2 * ranks, "task.hold": "", "interrupt.signal_grace_s": 5}
        return [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]

    def _submitit(self, nodes: int) -> Sequence[str]:
        return [sys.executable, f"{SHARED}/submit.py", str(nodes), "3600"]

    def _torchx(self, nodes: int) -> Sequence[str]:
        return [f"{self.torchx}/python", f"{SHARED}/with_torchx.py", str(nodes), "3600"]

    def _submit(self, words: Sequence[str]) -> None:
        # The job has it too: torchrun is this environment's.
        self.slurm.controller.exec("env", "--chdir", SHARED, f"PATH={sys.prefix}/bin:/usr/bin:/bin", *words)

    def _ranks(self) -> list[Node]:
        on = [node for node in self.slurm.workers if node.running]
        return [node for node in on if node.exec("pgrep", "-f", RANK, check=False).returncode == 0]

    def _mark_names(self) -> list[str]:
        return sorted(path.name for path in self.lab.shared.glob(f"{MARK}.*"))

    def _marks(self, count: int) -> bool:
        return len(self._mark_names()) == count

    def _cleaned(self, took: float) -> float:
        """The same figure, once nothing of the case is left."""
        self.slurm.call("scancel", "--user=root")
        _wait(lambda: not self.slurm.call("squeue", "--noheader").stdout.strip())
        self.slurm.wait({node.name: "idle" for node in self.slurm.workers}, 900.0)
        for path in self.lab.shared.glob(f"{MARK}.*"):
            path.unlink()
        shutil.rmtree(self.run, ignore_errors=True)
        return took


def _wait(holds: Callable[[], object]) -> None:
    wait_until(holds, 900.0)


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    if missing := why_not() or lab_slurm.why_not():
        sys.exit(f"bench_launch: {missing}")
    torchx = environment(WORK / "torchx", [TORCHX_REQUIREMENT], ["torchx"])
    with Lab(1 + WORKERS, "cpu", folders=[ROOT, sys.prefix, sys.base_prefix, str(torchx.parent)]) as lab:
        bench = Bench(lab, Slurm(lab).start(), torchx)
        bench.write()
        starts = interleaved(
            {
                "true": bench.start_of_true,
                "ours": bench.start_of_ours,
                "submitit": bench.start_of_submitit,
                "torchx": bench.start_of_torchx,
            },
            repetitions,
        )
        losses = interleaved(
            {
                "ours": bench.restart_of_ours,
                "submitit": bench.restart_of_submitit,
                "torchx": bench.restart_of_torchx,
            },
            min(repetitions, MOST_LOSSES),
        )
    true, ours, submitit, torchx_start = (median(starts[name]) for name in ("true", "ours", "submitit", "torchx"))
    again, requeued, torchx_requeued = (median(losses[name]) for name in ("ours", "submitit", "torchx"))
    detected, step = median(bench.lost["detected"]), median(bench.lost["first step"])
    start, restart, step_figure = (
        f"fab train -> ranks on {WORKERS} nodes",
        "a node is lost -> ranks start on others",
        "a node is lost -> first new step",
    )
    least, silence = (true, "a job of `true`"), (SILENT_S, "the silence that counts")
    rows = [
        _within(start, ours, true + START_BAR_S, f"a job of `true`, and {START_BAR_S:g} s", *least),
        _within(start, ours, submitit, "submitit: a function runs on all", *least),
        _within(start, ours, torchx_start, "torchx: workers of dist.ddp run on all", *least),
        _within(
            restart, again, detected + RESTART_BAR_S, f"Slurm takes it for lost, and {RESTART_BAR_S:g} s", *silence
        ),
        _within(restart, again, requeued, "submitit: Slurm requeues its job", *silence),
        _within(restart, again, torchx_requeued, "torchx: Slurm requeues its job", *silence),
        _within(step_figure, step, STEP_BAR_S, "the bar", *silence),
    ]
    return [row.as_dict() for row in rows]


def _within(figure: str, ours: float, baseline: float, name: str, limit: float, limit_name: str) -> Row:
    return Row(
        figure=figure,
        ours=ours,
        baseline=baseline,
        ratio=ours / baseline,
        bar=1.0,
        limit=limit,
        unit="s",
        baseline_name=name,
        limit_name=limit_name,
        at_most=True,
    )


if __name__ == "__main__":
    sys.exit(run_bench(measure))
