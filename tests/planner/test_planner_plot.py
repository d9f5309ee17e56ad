"""The plan's picture: its axes hold the plan's own figures, and what cannot be drawn is one line before anything is planned."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lustrain.problem import UserError
from planner import plot, tasks
from tests.conftest import require
from tests.planner.requests import Files

SPOT = ("spot=20",)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    require(importlib.util.find_spec("matplotlib"), "no matplotlib: pip install 'lustrain[plot]'")
    return Files(tmp_path)


@pytest.mark.slow
def test_axes_hold_the_figures_of_the_plan(files: Files) -> None:
    made = files.plan(nodes="8", price=SPOT)
    steps, scaling, cost = plot.draw_plan(made).axes

    computing, waiting = steps.containers
    times = sorted((one.step.compute, one.step.exposed) for one in made.options if one.runnable and one.step)
    drawn = [(bar.get_width(), rest.get_width()) for bar, rest in zip(computing, waiting, strict=True)]
    assert [bar for pair in sorted(drawn) for bar in pair] == pytest.approx([one for pair in times for one in pair])
    assert [rest.get_x() for rest in waiting] == [bar.get_width() for bar in computing]
    bold = [label.get_text() for label in steps.get_yticklabels() if label.get_fontweight() == "bold"]
    assert bold == [f"{made.best.strategy.kind}, {made.best.strategy.recompute}"]

    planned, targets = ({tuple(map(float, point)) for point in line.get_xydata()} for line in scaling.get_lines())
    assert planned == {(row.nodes, row.efficiency) for row in made.scaling}
    assert targets == {(row.nodes, row.target) for row in made.scaling if row.target}

    heights = {bars.get_label(): bars[0].get_height() for bars in cost.containers}
    priced = {one.rate.mode: one.usd_per_million(made.request.tokens) for one in made.outcomes if one.usd is not None}
    assert heights == priced
    assert set(heights) == {"on-demand", "spot", "capacity-block"}
    assert [text.get_text() for text in cost.texts].count("?") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_task_writes_the_picture_it_names(files: Files, suffix: str, begin: bytes) -> None:
    path = files.folder / f"plan{suffix}"
    result = tasks.plan_training.body.__wrapped__(files.flags(plot=str(path)))
    assert path.read_bytes().startswith(begin)
    assert result.data["plot"] == str(path)
    assert result.lines[-1] == f"wrote {path}"


@pytest.mark.parametrize("name", ["plan.jpg", "plan", "absent/plan.png"])
def test_picture_that_cannot_be_written_is_one_line(files: Files, name: str) -> None:
    with pytest.raises(UserError) as error:
        tasks.plan_training.body.__wrapped__(files.flags(tokens="many", plot=str(files.folder / name)))
    assert [line.path for line in error.value.problems] == ["--plot"]


def test_missing_library_is_one_line(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.metrics.plot.find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        tasks.plan_training.body.__wrapped__(files.flags(plot=str(files.folder / "plan.png")))
    assert [line.path for line in error.value.problems] == ["plot"]
