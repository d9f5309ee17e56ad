"""FSDP2 through all of our machinery: against torch's own calls on the same model, and a rank's host memory at its start."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.bench.harness import Row, median, run_bench
from tests.fork_server import ForkServer
from tests.trainer.token_sets import write_token_set
from trainer import config as configuration
from trainer.loop import Training, train, train_step
from trainer.tasks import make_task
from trainer.tasks.language_model import LanguageModel
from trainer.train import finish, prepare

RANKS = 2
PAIRS = 5
"""Steps of each side in a round, one of ours after one of plain calls: whatever else the machine does slows both down."""
STATES = 16
"""Bytes of weight, gradient and two moments in fp32, per parameter."""
PEAK = 1.5
CONFIG = """
[run]
uri = "{folder}/run"
[task]
name = "language_model"
data = "{tokens}"
seq_len = {seq_len}
[task.model]
width = {width}
layers = {layers}
heads = 8
kv_heads = 8
hidden = {hidden}
vocab_size = {vocab}
[train]
steps = 100000
global_batch = {batch}
micro_batch = {micro}
grad_clip = 1.0
[checkpoint]
every_steps = 100000
[parallel]
device = "cpu"
shard = 0
"""
STEP = {"width": 256, "layers": 4, "hidden": 768, "vocab": 2048, "seq_len": 128, "micro": 8, "batch": 8 * RANKS}
TINY = {"width": 16, "layers": 1, "hidden": 16, "vocab": 4096, "seq_len": 16, "micro": 1, "batch": RANKS}
HEAVY = {"width": 1024, "layers": 12, "hidden": 2816, "vocab": 4096, "seq_len": 16, "micro": 1, "batch": RANKS}


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-fsdp-") as name:
        folder = Path(name)
        server = ForkServer(folder)
        text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        write_token_set(folder / "tokens", {"train": text})
        rows = [step_row(server, folder, max(repetitions, 9)), *peak_rows(server, folder)]
    return [row.as_dict() for row in rows]


def peak_rows(server: ForkServer, folder: Path) -> list[Row]:
    """Each rank's peak above that of a tiny model's rank: ready for the first step of a run, and of one that goes on."""
    configs = {"tiny": folder / "tiny.toml", "heavy": folder / "heavy.toml"}
    configs["tiny"].write_text(CONFIG.format(folder=f"{folder}/tiny", tokens=folder / "tokens", **TINY))
    configs["heavy"].write_text(CONFIG.format(folder=f"{folder}/heavy", tokens=folder / "tokens", **HEAVY))
    rows = []
    for steps, label in ((1, "start"), (2, "resume")):
        (tiny, *_), *_ = server.call(peaks_of_run, RANKS, str(configs["tiny"]), steps)
        measured = server.call(peaks_of_run, RANKS, str(configs["heavy"]), steps)
        share = STATES * measured[0][2] / RANKS
        ready, saved = (max(rank[at] for rank in measured) - tiny for at in (0, 1))
        note = f"{ready / 1e6:.0f} MB for {share / 1e6:.0f} MB of states; {saved / share:.2f} after a step and a save"
        figure = f"host memory of a rank that is ready, {label}, in shares of states"
        rows.append(Row(figure, ready / share, PEAK, ready / share, PEAK, None, "", "allowed", at_most=True, note=note))
    return rows


def peaks_of_run(rank: int, config: str, steps: int) -> tuple[float, float, int]:
    """Bytes at a rank's peak, when it is ready to train and after it has trained to this step, and the model's parameters."""
    loaded = configuration.load(Path(config), [f"train.steps={steps}", "schedule.total_steps=10"])
    with ExitStack() as cleanup, ExitStack() as together:
        training = prepare(loaded, make_task(loaded.task, seed=1), cleanup, together)[0]
        ready = status("VmHWM")
        assert finish(training, train(training)) == 0
        parameters = sum(parameter.numel() for parameter in training.model.parameters())
    return ready, status("VmHWM"), parameters


def status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024.0
    raise LookupError(field)


def step_row(server: ForkServer, folder: Path, repetitions: int) -> Row:
    config = folder / "step.toml"
    config.write_text(CONFIG.format(folder=f"{folder}/step", tokens=folder / "tokens", **STEP))
    ours, plain = server.call(both_ways, RANKS, str(config), repetitions)[0]
    shape = f"width {STEP['width']}, {STEP['layers']} layers, {STEP['batch']} x {STEP['seq_len']} tokens, fp32"
    ratios = quantiles([other / mine for mine, other in zip(ours, plain, strict=True)], n=4)
    spread = f"{len(ours)} pairs of steps, half of their ratios in {ratios[0]:.2f} to {ratios[2]:.2f}"
    note = f"{RANKS} ranks, one thread each; {shape}; the median of {spread}"
    return Row(
        "training step with FSDP2 on the CPU",
        median(ours),
        median(plain),
        ratios[1],
        0.95,
        None,
        "s",
        baseline_name="fully_shard in a plain loop",
        note=note,
    )


def both_ways(rank: int, config: str, repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds of each step of ours and of the plain loop, in turns, on this rank."""
    loaded = configuration.load(Path(config), [])
    measured: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as cleanup, ExitStack() as together:
        training = prepare(loaded, make_task(loaded.task, seed=1), cleanup, together)[0]
        sides = (our_step(training), plain_step(training))
        for side in sides:
            side()
        for number in range(repetitions * PAIRS):
            for at in (0, 1) if number % 2 else (1, 0):
                dist.barrier()
                began = time.perf_counter()
                sides[at]()
                dist.barrier()
                measured[at].append(time.perf_counter() - began)
    return measured


def our_step(training: Training) -> Callable[[], None]:
    def step() -> None:
        number = training.progress.step + 1
        train_step(training, number)
        training.progress.step = number

    return step


def plain_step(training: Training) -> Callable[[], None]:
    """torchtitan's order of calls (https://github.com/pytorch/torchtitan), on a model of the same shape."""
    task = training.task
    assert isinstance(task, LanguageModel)
    model = task.build_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in task.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    length, micro = int(STEP["seq_len"]), int(STEP["micro"])
    tokens = torch.randint(int(STEP["vocab"]), (micro, length + 1))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shared = loss.detach()
        dist.all_reduce(shared)
        shared.item()

    return step


def main() -> int:
    return run_bench(measure)


if __name__ == "__main__":
    # Ranks look their work up by its module, which has no such name while it is run as a program.
    from tests.bench import bench_fsdp

    sys.exit(bench_fsdp.main())
