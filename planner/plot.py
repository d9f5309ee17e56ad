"""`fab plan-training --plot FILE`: step times, scaling beside its targets, and cost per million tokens, in one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lustrain.problem import UserError
from lustrain.progress import amount_text
from planner.plan import TARGETS, Option, Outcome, Plan
from planner.units import parameters_text
from trainer.metrics.plot import (
    CUT_COLOURS,
    EVAL,
    INK,
    LOSS,
    MUTED,
    SHARE,
    SPEED,
    new_figure,
    output_problems,
    set_title,
    style_axes,
    write_figure,
)
from trainer.metrics.timeline import Cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLAG = "--plot"
WAITING = CUT_COLOURS[Cut.NOTICE]
MODE_COLOURS = {"on-demand": LOSS, "spot": SPEED, "capacity-block": EVAL, "training-plan": SHARE}


def require_output(path: Path) -> None:
    """UserError where no picture can be written to `path`."""
    if problems := output_problems(path, FLAG):
        raise UserError(problems)


def write_plot(plan: Plan, path: Path) -> None:
    """Draw the plan into a file whose ending names its kind. UserError."""
    write_figure(draw_plan(plan), path, FLAG)


def draw_plan(plan: Plan) -> Figure:
    """Draw seconds of a step by strategy, efficiency by nodes, and USD per million tokens by how nodes are paid."""
    request = plan.request
    options = [option for option in plan.options if option.runnable]
    figure = new_figure(12, 3.4 + 0.22 * len(options))
    steps, scaling, cost = figure.subplots(1, 3, width_ratios=[1.3, 1, 1])
    draw_steps(steps, options, plan.best)
    draw_scaling(scaling, plan)
    draw_cost(cost, plan)
    style_axes(steps, "x")
    for axes in (scaling, cost):
        style_axes(axes)
    set_title(
        figure,
        f"{parameters_text(request.work.parameters)} parameters, {amount_text(request.tokens, 'tokens')}, "
        f"{request.nodes} x {request.node.type}; speed {request.efficiency:.1%} of the peak, {request.efficiency_origin}",
    )
    return figure


def draw_steps(axes: Axes, options: list[Option], best: Option) -> None:
    """Draw a bar for each strategy that fits, fastest on top: computation, and after it what waits for the network."""
    rows = sorted(options, key=lambda option: option.step.total if option.step else 0.0)
    names = [f"{option.strategy.kind}, {option.strategy.recompute}" for option in rows]
    compute = [option.step.compute if option.step else 0.0 for option in rows]
    waiting = [option.step.exposed if option.step else 0.0 for option in rows]
    places = range(len(rows))
    axes.barh(places, compute, 0.7, color=LOSS, label="computation")
    axes.barh(places, waiting, 0.7, left=compute, color=WAITING, label="waiting for the network")
    axes.set_yticks(places, names, fontsize=8)
    for label, option in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if option is best else "normal")
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, by strategy and recomputation", color=INK)
    axes.legend(loc="upper right", framealpha=0.9, edgecolor="none", fontsize=8)


def draw_scaling(axes: Axes, plan: Plan) -> None:
    from matplotlib.ticker import PercentFormatter

    rows = [(row.nodes, row.efficiency) for row in plan.scaling if row.efficiency is not None]
    counts = [row.nodes for row in plan.scaling]
    targets = [(nodes, share) for nodes, share in TARGETS.items() if nodes in counts]
    axes.plot(*zip(*rows, strict=True), "o-", color=SPEED, markersize=4, label="planned")
    if targets:
        axes.plot(*zip(*targets, strict=True), "_", color=WAITING, markersize=14, markeredgewidth=2, label="target")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(nodes) for nodes in counts], minor=False)
    axes.set_ylim(0, max(1.1, *(1.05 * share for _, share in rows)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("scaling efficiency", color=INK)
    axes.set_xlabel("nodes", color=INK)
    axes.legend(loc="lower left", framealpha=0.9, edgecolor="none", fontsize=8)


def draw_cost(axes: Axes, plan: Plan) -> None:
    """Draw a bar for each way to pay; one without a known price, or that never ends, has its name and no bar."""
    costs = [_usd_per_million(plan, outcome) for outcome in plan.outcomes]
    names = [f"{outcome.rate.mode}\n{outcome.rate.origin}" for outcome in plan.outcomes]
    for place, (outcome, usd) in enumerate(zip(plan.outcomes, costs, strict=True)):
        if usd is None:
            axes.annotate("?", (place, 0), xytext=(0, 4), textcoords="offset points", ha="center", color=MUTED)
            continue
        axes.bar(place, usd, 0.6, color=MODE_COLOURS[outcome.rate.mode], label=outcome.rate.mode)
        axes.annotate(f"{usd:.3g}", (place, usd), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(names)), [name.partition(":")[0] for name in names], fontsize=7, rotation=20)
    axes.set_ylabel("USD per million tokens", color=INK)
    axes.set_ylim(bottom=0)


def _usd_per_million(plan: Plan, outcome: Outcome) -> float | None:
    return outcome.usd_per_million(plan.request.tokens) if outcome.goodput > 0 else None
