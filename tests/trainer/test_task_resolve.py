"""A Task is found by its shipped name or by a stranger's dotted one; anything else is one line and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from lustrain.problem import UserError
from trainer.config import TaskConfig
from trainer.tasks import SHIPPED, Task, make_task, resolve

STRANGER = "tests.trainer.tiny_task:Tiny"


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_names_are_tasks(name: str) -> None:
    assert issubclass(resolve(name), Task)


def test_a_strangers_task_works_with_its_own_options() -> None:
    task = make_task(TaskConfig.model_validate({"name": STRANGER, "samples": 5}), seed=0)
    task.open(Path())
    assert (task.options.samples, task.train_samples) == (5, 5)
    assert (task.export_names(task.build_model()), task.export_config(task.build_model())) == ({}, {})
    with pytest.raises(UserError, match=r"^task\.strike = 'x': "):
        make_task(TaskConfig.model_validate({"name": STRANGER, "strike": "x"}), seed=0)


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
def test_what_is_no_task_is_one_line_that_lists_the_shipped_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_task.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as caught:
        resolve(name)
    (line,) = caught.value.problems
    assert line.startswith(f"task.name = {name!r}: ")
    assert all(shipped in line for shipped in SHIPPED)
