"""A Task is found by its shipped name or by a stranger's dotted one; anything else is one line and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lustrain.problem import UserError
from trainer.config import TaskConfig
from trainer.tasks import SHIPPED, Task, make_task, resolve

STRANGER = """
import torch
from trainer.config import Samples, Section
from trainer.tasks import LossSum, Task

class Options(Section):
    slope: Samples = 2

class Line(Task):
    Options = Options
    train_samples = eval_samples = 10
    def open(self, cache_dir): pass
    def build_model(self): return torch.nn.Linear(1, 1)
    def train_batch(self, ids):
        x = torch.from_numpy(ids).float()[:, None]
        return {"x": x, "y": x * self.options.slope}
    eval_batch = train_batch
    def loss(self, model, batch):
        return LossSum(((model(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"]))
    def tokens_per_sample(self): return 1
    def blocks(self, model): return []
    def flops_per_token(self, model): return 6.0
    def fingerprint(self): return {}
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stranger_task.py").write_text(STRANGER)
    (tmp_path / "broken_task.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stranger_task", raising=False)
    return "stranger_task:Line"


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_names_are_tasks(name: str) -> None:
    assert issubclass(resolve(name), Task)


def test_a_strangers_task_works_with_its_own_options(stranger: str) -> None:
    task = make_task(TaskConfig.model_validate({"name": stranger, "slope": 5}), seed=0)
    assert task.options.slope == 5
    assert (task.export_names(task.build_model()), task.export_config(task.build_model())) == ({}, {})
    with pytest.raises(UserError, match=r"^task\.slope = 0: "):
        make_task(TaskConfig.model_validate({"name": stranger, "slope": 0}), seed=0)


@pytest.mark.parametrize(
    "name",
    [
        "languagemodel",
        "nowhere.module:Class",
        "trainer.tasks",
        "trainer.tasks:",
        ":",
        "trainer.tasks:LossSum",
        "broken_task:X",
    ],
)
def test_what_is_no_task_is_one_line_that_lists_the_shipped_ones(name: str, stranger: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(name)
    (line,) = caught.value.problems
    assert line.startswith(f"task.name = {name!r}: ")
    assert all(shipped in line for shipped in SHIPPED)
