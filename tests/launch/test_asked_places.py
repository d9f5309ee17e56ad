"""What names no run, and a Python that is not there, are refused before anything is recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launch.asked import ask
from launch.wish import TrainWish
from lustrain.problem import UserError
from tests.launch.test_asked import config


@pytest.mark.parametrize(
    ("uri", "python", "path"),
    [("s3://", None, "run.uri"), ("s3:/", None, "run.uri"), ("runs/first", "/nope/python", "--python")],
)
def test_it_is_one_line(tmp_path: Path, uri: str, python: str | None, path: str) -> None:
    settings = config(tmp_path)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"uri": uri})})
    wish = dataclasses.replace(TrainWish("config.toml"), python=python)
    with pytest.raises(UserError) as error:
        ask(wish, settings, None, 1, tmp_path)
    assert [problem.path for problem in error.value.problems] == [path]  # type: ignore[attr-defined]
