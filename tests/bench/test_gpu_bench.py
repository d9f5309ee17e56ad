"""The benches for a GPU, as far as a machine without one can tell: what they print before, and that their steps run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lustrain.problem import USAGE
from lustrain.progress import BYTES, amount_text
from planner.memory import memory
from tests.bench import gpu, gpu_plans
from trainer.tasks.models.llama import LlamaShape


def test_dry_run_prints_the_planned_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--only", "plans", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, (work, strategy) in zip(lines, gpu_plans.works(), strict=True):
        assert line.startswith(f"{work.parameters / 1e9:.2f}B parameters")
        assert f"{amount_text(memory(work, strategy).total, BYTES)} at the peak" in line


@pytest.mark.parametrize("words", [["--only", "plan"], *([] if torch.cuda.is_available() else [[]])])
def test_unknown_bench_or_no_gpu_is_refused(words: list[str]) -> None:
    assert gpu.main(words) == USAGE


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the steps on the CPU")
def test_steps_of_both_sides_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plans, "STEPS", 1)
    monkeypatch.setattr(gpu_plans, "WARM_UP", 0)
    shape = LlamaShape(width=16, layers=1, heads=2, kv_heads=2, hidden=16, vocab_size=32, tied=False)
    plans = [
        (replace(work, shape=shape, seq_len=8, global_batch=gpu_plans.MICRO_BATCHES, micro_batch=1), strategy)
        for work, strategy in gpu_plans.works()
    ]
    measured = list(gpu_plans.measure(plans, repetitions=1))
    assert [[row["ours"] > 0 and row["baseline"] > 0 for row in rows] for rows in measured] == [[True]] * len(plans)
