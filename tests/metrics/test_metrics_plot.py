"""The figure shows what happened, and bad input is one line."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from trainer.__main__ import main
from trainer.metrics import RunLog
from trainer.metrics.plot import draw_run, draw_timeline, running_median, story_of, summary
from trainer.metrics.reader import Attempt
from trainer.metrics.runlog import append_event
from trainer.metrics.timeline import Cut, Span, cuts, spans
from trainer.storage.local import LocalStore

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def matplotlib() -> None:
    require(importlib.util.find_spec("matplotlib"), "no matplotlib: pip install 'lustrain[plot]'")


def log_attempt(
    store: LocalStore, generation: int, first: int, last: int, *, code: int | None, world_size: int = 2
) -> None:
    """One attempt over steps `first` to `last`, which logs a `stopped` event with `code` unless it is lost."""
    log = RunLog(store, generation, 60.0)
    for step in range(first, last + 1):
        evaluated = {"eval_loss": 10.0 / step} if step % 10 == 0 else {}
        if evaluated:
            log.event("checkpoint_committed", {"step": step})
        log.step({"step": step, "loss": 9.0 / step, "tokens_per_second": 4e3, "world_size": world_size, **evaluated})
    if code is not None:
        log.event("stopped", {"step": last, "exit_code": code})
    log.close()


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    """Three attempts: stopped on notice at 20, lost at 35, gone on from 30 with another world size and done at 50."""
    store = LocalStore(str(tmp_path / "my-run"))
    log_attempt(store, 1, 1, 20, code=85)
    log_attempt(store, 4, 21, 35, code=None)
    log_attempt(store, 5, 31, 50, code=0, world_size=1)
    return store


def test_generation_that_a_roll_back_ended_was_not_lost(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "my-run"))
    log_attempt(store, 1, 1, 20, code=None)
    log_attempt(store, 2, 11, 30, code=0)
    append_event(store, 2, "rolled_back", {"step": 21, "to_step": 10, "from_attempt": 1})
    story = story_of(store)
    assert story.cuts == [(20, Cut.ROLLED_BACK)]
    assert story.redone == [(11, 20)]


@pytest.mark.slow
def test_timeline_has_attempts_interruptions_saves_and_repeats(run: LocalStore) -> None:
    story = story_of(run)
    assert story.steps == list(range(1, 51))
    assert story.spans == [Span(1, 1, 20, 2), Span(4, 21, 30, 2), Span(5, 31, 50, 1)]
    assert story.cuts == [(20, Cut.NOTICE), (35, Cut.LOST)]
    assert story.resumes == [20, 30]
    assert story.saves == [10, 20, 30, 40, 50]
    assert story.redone == [(31, 35)]
    assert story.eval_steps == [10, 20, 30, 40, 50]
    assert summary(story) == "50 steps · 3 attempts · 5 saves · 5 steps done over"


def test_an_attempt_whose_steps_were_all_done_over_has_no_span() -> None:
    three = [Attempt(1, 1, 9, 2, "", ""), Attempt(2, 6, 8, 2, "", ""), Attempt(3, 4, 12, 2, "", "")]
    assert spans(three) == [Span(1, 1, 3, 2), Span(3, 4, 12, 2)]


def test_attempt_that_logged_no_step_is_counted(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "my-run"))
    log_attempt(store, 1, 1, 20, code=None)
    append_event(store, 2, "resumed", {"step": 10, "world_size": 2})
    story = story_of(store)
    assert (story.cuts, story.resumes, story.redone) == ([(20, Cut.LOST)], [10], [(11, 20)])
    log_attempt(store, 3, 11, 30, code=0)
    story = story_of(store)
    assert (story.cuts, story.resumes) == ([(20, Cut.LOST), (10, Cut.LOST)], [10, 10])
    assert ([span.generation for span in story.spans], story.redone) == ([1, 3], [(11, 20)])


def test_generation_after_a_roll_back_is_one_without_steps_too(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "my-run"))
    log_attempt(store, 1, 1, 20, code=None)
    append_event(store, 2, "rolled_back", {"step": 21, "to_step": 10, "from_attempt": 1})
    story = story_of(store)
    assert (story.cuts, story.resumes, story.redone) == ([(20, Cut.ROLLED_BACK)], [10], [(11, 20)])
    log_attempt(store, 3, 11, 30, code=0)
    assert story_of(store).cuts == [(20, Cut.ROLLED_BACK), (10, Cut.LOST)]


def test_name_of_a_run_that_is_no_utf8_is_drawn(tmp_path: Path) -> None:
    store = LocalStore(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    log_attempt(store, 1, 1, 20, code=0)
    draw_run(store, tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 0


def test_last_attempt_is_not_called_lost_while_it_may_still_run() -> None:
    assert cuts([Attempt(1, 1, 9, 2, "", "")], []) == []


@pytest.mark.slow
def test_the_figure_has_named_axes_every_curve_and_every_mark(run: LocalStore) -> None:
    figure = draw_timeline(story_of(run), title="my-run")
    loss, speed = figure.axes
    assert (loss.get_ylabel(), speed.get_ylabel(), speed.get_xlabel()) == ("loss", "tokens / s", "step")
    legend = loss.get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} == {
        "loss",
        "evaluation loss",
        "stopped on notice",
        "lost without notice",
        "checkpoint committed",
        "resumed from here",
    }
    assert {text.get_text() for text in loss.texts} == {"attempt 1\n2 ranks", "attempt 4\n2 ranks", "attempt 5\n1 rank"}
    assert figure.get_suptitle() == "my-run"
    curve = loss.get_lines()[0]
    assert list(map(float, curve.get_ydata())) == [9.0 / step for step in range(1, 51)]  # type: ignore[arg-type]


def test_one_attempt_without_saves_is_drawn_plainly(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "short"))
    log_attempt(store, 1, 1, 3, code=0)
    figure = draw_timeline(story_of(store), title="short")
    assert list(figure.axes[0].texts) == []
    figure.savefig(tmp_path / "short.svg")
    assert (tmp_path / "short.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_diverged_run_is_drawn(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "run"))
    log = RunLog(store, 1, 60.0)
    for step in range(1, 900):
        loss = math.nan if step > 300 else 1.0
        log.step({"step": step, "loss": loss, "tokens_per_second": math.inf, "world_size": 1})
    log.close()
    draw_run(store, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_running_median_ignores_outliers_and_missing_numbers() -> None:
    nan = math.nan
    assert running_median([1.0, 1.0, 50.0, 1.0, nan, 2.0], 3) == [1.0, 1.0, 1.0, 25.5, 1.5, 2.0]
    assert str(running_median([nan, nan], 1)) == "[nan, nan]"


@pytest.mark.slow
def test_the_command_writes_a_picture_and_says_what_is_on_it(
    run: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run.put("metrics/000009-00000.jsonl", b"{\n")
    out = tmp_path / "run.png"
    assert main(["plot", run.uri, "-o", str(out)]) == 0
    (message,) = caplog.messages
    assert message.startswith("metrics/000009-00000.jsonl line 1: left out")
    assert out.read_bytes().startswith(PNG)
    assert capsys.readouterr().out == f"{out}: 50 steps · 3 attempts · 5 saves · 5 steps done over\n"


@pytest.mark.parametrize(
    ("output", "why"),
    [("run.xyz", "unknown kind of picture"), ("absent/run.png", "its folder does not exist"), ("run", "unknown")],
)
def test_an_impossible_output_is_one_line_and_exit_code_2(
    run: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, why: str
) -> None:
    assert main(["plot", run.uri, "-o", str(tmp_path / output)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("--output = ")
    assert why in said


@pytest.mark.slow
def test_the_kinds_that_are_allowed_are_those_of_the_help(
    run: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plot", "--help"])
    assert ".png, .svg, .pdf" in capsys.readouterr().out
    main(["plot", run.uri, "-o", str(tmp_path / "run.jpg")])
    assert capsys.readouterr().err.endswith("; allowed: .png, .svg, .pdf\n")
    for kind in (".png", ".svg", ".pdf"):
        assert main(["plot", run.uri, "-o", str(tmp_path / f"run{kind}")]) == 0
        assert (tmp_path / f"run{kind}").stat().st_size > 1000


@pytest.mark.slow
def test_a_home_that_cannot_be_written_is_no_matter(run: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, so nobody can make a folder in it")
    spare = tmp_path / "spare"
    spare.mkdir()
    told = {"HOME": str(tmp_path / "home"), "TMPDIR": str(spare)}
    rest = {name: os.environ[name] for name in os.environ if not name.startswith(("XDG_", "MPL"))}
    command = [sys.executable, "-m", "trainer", "plot", run.uri, "-o", str(tmp_path / "run.png")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, env=rest | told, check=False)
    assert (said.returncode, said.stderr) == (0, "")
    assert list(spare.iterdir()) == []


def test_a_run_without_records_or_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        assert main(["plot", str(tmp_path / name), "-o", str(tmp_path / "out.png")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out.png").exists()
    assert not (tmp_path / "absent").exists()
