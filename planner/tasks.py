"""`fab plan-training`, `run-cost`, `spot-advice`.

Imports of what a task does stand in it: every `fab` loads this file.
"""

from __future__ import annotations

from lustrain.task import TaskResult, task
from planner.flags import PlanFlags, RunCostFlags, SpotAdviceFlags


@task("plan-training")
def plan_training(flags: PlanFlags) -> TaskResult:
    """Show what training on so many tokens needs: memory by strategy, step time, scaling, goodput, wall time and cost."""
    from pathlib import Path

    from planner import plot, report
    from planner.plan import plan
    from planner.request import resolve_request

    if flags.plot is not None:
        plot.require_output(Path(flags.plot))
    request = resolve_request(flags)
    if flags.online:
        from planner.online import with_prices_of_today

        request = with_prices_of_today(request)
    made = plan(request)
    lines, data = list(report.lines(made)), report.data(made)
    if flags.plot is not None:
        plot.write_plot(made, Path(flags.plot))
        lines, data = [*lines, "", f"wrote {flags.plot}"], data | {"plot": flags.plot}
    return TaskResult(lines, data)


@task("run-cost")
def run_cost(flags: RunCostFlags) -> TaskResult:
    """Show what a run's nodes have cost so far, what interruptions were of it, and what it costs to its last step."""
    from planner import run_cost as reading

    if not flags.online:
        return TaskResult(*reading.run_cost(flags))
    from planner.online import prices_of_today

    return TaskResult(*reading.run_cost(flags, prices_of_today))


@task("spot-advice")
def spot_advice(flags: SpotAdviceFlags) -> TaskResult:
    """Show which types and zones were cheap and steady on spot, from a price history, and when a capacity block costs less."""
    from pathlib import Path

    from planner import spot

    spot.require_online(flags)
    if flags.online:
        from planner.online import changes_of

        changes = changes_of(flags)
    else:
        changes = spot.read_history(Path(flags.history))
    found = spot.markets(changes)
    return TaskResult(list(spot.lines(found)), spot.data(found))


TASKS = (plan_training, run_cost, spot_advice)
