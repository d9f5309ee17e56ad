"""`python -m trainer plot RUN_URI -o FILE.png`: loss, throughput, goodput, and what happened to the run, in one figure."""

from __future__ import annotations

import argparse
import logging
import math
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lustrain.problem import UserError, plain, problem
from trainer.metrics.alerts import Firing, names
from trainer.metrics.reader import read_events, read_history
from trainer.metrics.timeline import Cut, Timeline, timeline
from trainer.storage import ObjectStore, open_store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, BAND = "#1f2933", "#7b8794", "#eef2f6"
LOSS, EVAL, SPEED, SHARE = "#2563ab", "#7c3aed", "#0f766e", "#4d7c0f"
CUT_COLOURS = {Cut.NOTICE: "#d97706", Cut.LOST: "#c81e1e", Cut.ROLLED_BACK: "#7c3aed"}
MOST_LABELS = 12
"""Attempts beyond this number are shaded but not named: their names would overlap."""
SMOOTHED_FROM = 400
"""Records from which a running median is drawn over the single values."""
LONGEST_WINDOW = 101
DOTS_PER_INCH = 150
DAY_S = 86_400
"""matplotlib counts time in days since 1970
(https://matplotlib.org/stable/api/dates_api.html#matplotlib-date-format)."""
KINDS = (".png", ".svg", ".pdf")
"""Kinds of pictures that are written: what browsers, editors and papers take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_URI", help="a run's folder or s3:// address")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help=f"picture to write: {', '.join(KINDS)}"
    )


def run(args: argparse.Namespace) -> int:
    """Draw one run into a file; UserError when there is nothing to draw or nowhere to put it."""
    problems = output_problems(args.output)
    if problems:
        raise UserError(problems)
    story = draw_run(open_store(args.run, create=False, name="RUN_URI"), args.output)
    print(f"{args.output}: {summary(story)}")
    return 0


def draw_run(
    store: ObjectStore, path: Path, *, began: float | None = None, alerts: Sequence[Firing] | None = None
) -> Timeline:
    """Draw a run into a file whose ending names its kind, and return what was drawn; raises UserError.

    `began` is when its first launch did, in Unix seconds; `alerts` are those that a Prometheus recorded, None without one.
    """
    story, figure = run_figure(store, began=began, alerts=alerts)
    write_figure(figure, path)
    return story


def run_figure(
    store: ObjectStore, *, began: float | None = None, alerts: Sequence[Firing] | None = None
) -> tuple[Timeline, Figure]:
    """Return what there is to draw of a run, and the figure, with `began` and `alerts` as in `draw_run`; raises UserError."""
    story = story_of(store, began)
    if not story.steps:
        raise UserError(problem("RUN_URI", store.uri, "holds no step records", fix="name a run that has trained"))
    return story, draw_timeline(story, title=store.uri.rstrip("/").rsplit("/", 1)[-1], alerts=alerts)


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
    return picture.getvalue()


def write_figure(figure: Figure, path: Path, flag: str = "--output") -> None:
    """Write a figure into a file whose ending names its kind; UserError names the flag that gave the file."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise UserError(problem(flag, str(path), f"cannot be written: {error.strerror}")) from error


def story_of(store: ObjectStore, began: float | None = None) -> Timeline:
    """Read what the figure shows of a run."""
    steps, attempts = read_history(store)
    return timeline(steps, read_events(store), attempts, began)


def output_problems(path: Path, flag: str = "--output") -> list[str]:
    """Why a figure cannot be written to `path`, which `flag` gave, or why none can be drawn at all."""
    if find_spec("matplotlib") is None:
        return [problem("plot", "matplotlib", "is not installed", fix="pip install 'lustrain[plot]'")]
    if path.suffix.lower() not in KINDS:
        return [problem(flag, str(path), "unknown kind of picture", allowed=", ".join(KINDS))]
    if not path.absolute().parent.is_dir():
        return [problem(flag, str(path), "its folder does not exist", fix=f"mkdir -p {path.parent}")]
    return []


def summary(story: Timeline) -> str:
    """Sum the run up in one line."""
    parts = [_count(len(story.steps), "step"), _count(len(story.spans), "attempt"), _count(len(story.saves), "save")]
    done_over = sum(last - first + 1 for first, last in story.redone)
    if done_over:
        parts.append(f"{_count(done_over, 'step')} done over")
    return " · ".join(parts)


def draw_timeline(story: Timeline, *, title: str, alerts: Sequence[Firing] | None = None) -> Figure:
    """Draw the figure: loss, throughput and goodput by step, with attempts shaded and interruptions marked; below them, unless
    None, alerts by time."""
    heights = [2.2, 1.0, *([0.8] if story.goodput else []), *([] if alerts is None else [alerts_height(alerts)])]
    figure = new_figure(10, 6 + 1.8 * sum(heights[2:]))
    from matplotlib.ticker import MaxNLocator

    panels = list(figure.subplots(len(heights), 1, height_ratios=heights))
    fired = [] if alerts is None else [panels.pop()]
    loss, speed, *share = panels
    draw_loss(loss, story)
    draw_speed(speed, story)
    for axes in share:
        draw_goodput(axes, story)
    for axes in fired:
        draw_alerts(axes, alerts or ())
    margin = max(1.0, 0.01 * (story.steps[-1] - story.steps[0]))
    for axes in panels:
        draw_attempts(axes, story)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(story.steps[0] - margin, story.steps[-1] + margin)
        axes.tick_params(axis="x", labelbottom=axes is panels[-1])
    for axes in (*panels, *fired):
        style_axes(axes)
    name_attempts(loss, story)
    draw_marks(loss, story)
    loss.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    panels[-1].set_xlabel("step", color=INK)
    set_title(figure, title)
    loss.set_title(summary(story), loc="left", fontsize=9.5, color=MUTED, pad=30 if len(story.spans) > 1 else 8)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, which needs no screen."""
    # Where it may not keep its list of fonts it makes a folder for this time, and would warn of that and of each missing font.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, title: str) -> None:
    # A run's name may hold what is a formula to matplotlib.
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)


def style_axes(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelcolor=INK)
    axes.grid(axis=grid, color="#d9e0e7", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_loss(axes: Axes, story: Timeline) -> None:
    draw_series(axes, story.steps, story.loss, LOSS, label="loss")
    if story.eval_steps:
        axes.plot(
            *(story.eval_steps, story.eval_loss, "o-"), color=EVAL, markersize=4, linewidth=1.2, label="evaluation loss"
        )
    axes.set_ylabel("loss", color=INK)


def draw_speed(axes: Axes, story: Timeline) -> None:
    from matplotlib.ticker import EngFormatter

    draw_series(axes, story.steps, story.tokens_per_second, SPEED)
    axes.set_ylabel("tokens / s", color=INK)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def draw_goodput(axes: Axes, story: Timeline) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.plot(story.steps, story.goodput, color=SHARE, linewidth=1.4)
    axes.set_ylabel("goodput", color=INK)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def alerts_height(alerts: Sequence[Firing]) -> float:
    """Return the height of the panel of alerts beside that of the loss."""
    return 0.3 + 0.14 * len(names(alerts))


def draw_alerts(axes: Axes, alerts: Sequence[Firing]) -> None:
    """Draw a row for each alert, with a bar from the begin to the end of each time that it fired, by the clock of UTC."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    rows = names(alerts)
    locator = AutoDateLocator(minticks=3)  # type: ignore[no-untyped-call]
    for number, name in enumerate(rows):
        times = [one for one in alerts if one.alert == name]
        begins = [one.began / DAY_S for one in times]
        # An alert that was read once lasts no time, and is drawn all the same.
        axes.plot(begins, [number] * len(begins), "|", color=CUT_COLOURS[Cut.LOST], markersize=9, markeredgewidth=1.5)
        spans = [(begin, (one.ended - one.began) / DAY_S) for begin, one in zip(begins, times, strict=True)]
        axes.broken_barh(spans, (number - 0.3, 0.6), color=CUT_COLOURS[Cut.LOST], linewidth=0)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_ylabel("alerts", color=INK)
    if rows:
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        axes.set_xlabel("time (UTC)", color=INK)
    else:
        axes.set_xticks([])
        axes.set_xlabel("none fired", color=INK)


def draw_series(axes: Axes, steps: list[int], values: list[float], colour: str, *, label: str = "") -> None:
    """Draw the values themselves; from SMOOTHED_FROM on pale, with their running median over them."""
    if len(values) < SMOOTHED_FROM:
        axes.plot(steps, values, color=colour, linewidth=1.4, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(
        steps, running_median(values, min(LONGEST_WINDOW, len(values) // 50)), color=colour, linewidth=1.6, label=label
    )


def draw_attempts(axes: Axes, story: Timeline) -> None:
    """Shade every second attempt and what was done over; mark where an attempt was cut."""
    for number, span in enumerate(story.spans):
        if number % 2:
            axes.axvspan(span.first - 0.5, span.last + 0.5, color=BAND, zorder=0, linewidth=0)
    for first, last in story.redone:
        axes.axvspan(first - 0.5, last + 0.5, color=CUT_COLOURS[Cut.LOST], alpha=0.1, zorder=0.5, linewidth=0)
    named: set[Cut] = set()
    for step, cut in story.cuts:
        label = None if cut in named else cut.value
        named.add(cut)
        style = "-" if cut is Cut.LOST else "--"
        axes.axvline(step + 0.5, color=CUT_COLOURS[cut], linewidth=1.3, linestyle=style, label=label)


def name_attempts(axes: Axes, story: Timeline) -> None:
    if not 1 < len(story.spans) <= MOST_LABELS:
        return
    for span in story.spans:
        axes.annotate(
            f"attempt {span.generation}\n{_count(span.world_size, 'rank')}",
            xy=((span.first + span.last) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=MUTED,
            annotation_clip=False,
        )


def draw_marks(axes: Axes, story: Timeline) -> None:
    """Small triangles at the edges: checkpoints below, and above where an attempt went on from; they hide no curve."""
    rows = (
        (story.saves, 0.02, "^", MUTED, "checkpoint committed"),
        (story.resumes, 0.975, "v", INK, "resumed from here"),
    )
    for steps, height, marker, colour, label in rows:
        if steps:
            heights = [height] * len(steps)
            transform = axes.get_xaxis_transform()
            axes.plot(
                steps, heights, marker, transform=transform, color=colour, markersize=5, markeredgewidth=0, label=label
            )


def running_median(values: Sequence[float], window: int) -> list[float]:
    """Return the median of up to `window` values around each value, finite ones only; NaN where none is left."""
    half = window // 2
    around = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    finite = ([value for value in near if math.isfinite(value)] for near in around)
    return [statistics.median(near) if near else math.nan for near in finite]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
