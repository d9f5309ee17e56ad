"""The states of a sweep's points, read from their runs, and its table: the point with the lowest validation loss first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from launch import logs
from launch import status as run_status
from launch.runs import read_record
from launch.sweep.grid import Point
from launch.sweep.record import Sweep
from lustrain.progress import Progress
from lustrain.tables import table
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_LOST_RUN
from trainer.metrics.reader import read_steps
from trainer.run.journal import REQUEST
from trainer.storage import ObjectStore

NOT_STARTED = "not started"
UNFINISHED = "unfinished"
"""It runs, waits for nodes, or was interrupted; only its scheduler knows whether it still has a job."""
DONE = "done"
ENDED_EARLY = "ended early"
"""It ended before its last step, and starts again only where that is requested."""
THREADS = 8
T = TypeVar("T")


def read_outcomes(sweep: Sweep) -> list[str]:
    """Return NOT_STARTED, UNFINISHED, DONE or ENDED_EARLY of each point."""
    return _of_each(sweep, lambda point: _outcome(*_run_of(sweep, point))[0])


def read(sweep: Sweep) -> dict[str, Any]:
    """Return the sweep and its points as plain JSON data, best first; points without a validation loss keep their order."""
    rows = read_rows(sweep)
    rows.sort(key=lambda row: math.inf if row["best_validation_loss"] is None else row["best_validation_loss"])
    return {"sweep": sweep.store.uri.rstrip("/"), "points": rows}


def read_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the points as plain JSON data, in the order of the sweep."""
    return _of_each(sweep, lambda point: _row(sweep, point))


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the table for people."""
    rows: Sequence[Mapping[str, Any]] = data["points"]
    if not rows:
        return ["no point is begun"]
    keys = list(rows[0]["values"])
    losses = ("validation_loss", "best_validation_loss")
    heads = [*keys, "state", "step", "validation loss", "best", "run"]
    cells = [
        [
            *(row["values"][key] for key in keys),
            row["state"],
            "-" if row["step"] is None else str(row["step"]),
            *("-" if row[loss] is None else f"{row[loss]:.4f}" for loss in losses),
            row["name"],
        ]
        for row in rows
    ]
    return table(heads, cells, right=("validation loss", "best"))


def validation_losses(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last and the lowest validation loss of step records, with their steps; a loss that is not finite is none."""
    found = [
        (float(one["eval_loss"]), int(one["step"])) for one in steps if math.isfinite(one.get("eval_loss", math.nan))
    ]
    last, best = (found[-1], min(found)) if found else ((None, None), (None, None))
    return {
        "validation_loss": last[0],
        "validation_step": last[1],
        "best_validation_loss": best[0],
        "best_validation_step": best[1],
    }


def _of_each(sweep: Sweep, read_point: Callable[[Point], T]) -> list[T]:
    with ThreadPoolExecutor(THREADS) as pool, Progress("runs", len(sweep.points), "runs", brief=True) as progress:

        def counted(point: Point) -> T:
            result = read_point(point)
            progress.advance()
            return result

        return list(pool.map(counted, sweep.points))


def _run_of(sweep: Sweep, point: Point) -> tuple[ObjectStore | None, dict[str, Any] | None]:
    request = read_record(sweep.store, f"{point.name}/{REQUEST}")
    if request is None:
        return None, None
    return sweep.store.subfolder(point.name), request


def _outcome(run: ObjectStore | None, request: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Return a point's outcome and the state of its run."""
    if run is None:
        return NOT_STARTED, {"state": NOT_STARTED, "step": None, "loss": None}
    state = run_status.read(run, request)
    word, final = state["state"], (run_status.WORDS[EXIT_CONFIG], run_status.WORDS[EXIT_LOST_RUN], run_status.STOPPED)
    if word == run_status.WORDS[EXIT_DONE]:
        return DONE, state
    # Runs on Kubernetes have no journal, only the words of their events.
    return (ENDED_EARLY if word in final or logs.has_ended(run, request or {}) else UNFINISHED), state


def _row(sweep: Sweep, point: Point) -> dict[str, Any]:
    run, request = _run_of(sweep, point)
    outcome, state = _outcome(run, request)
    return {
        "name": point.name,
        "run": f"{sweep.store.uri.rstrip('/')}/{point.name}",
        "values": dict(point.values),
        "outcome": outcome,
        **{key: state[key] for key in ("state", "step", "loss")},
        **validation_losses([] if run is None else read_steps(run)),
    }
