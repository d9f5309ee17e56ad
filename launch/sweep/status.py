"""The states of a sweep's points, read from their runs, and its table: the point with the lowest validation loss first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from launch import backends, logs
from launch import status as run_status
from launch.backends import HeldJob
from launch.runs import read_record, registered_uri
from launch.sweep.grid import Point
from launch.sweep.record import Sweep
from lustrain.progress import Progress
from lustrain.tables import table
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_LOST_RUN
from trainer.metrics.reader import last_steps, merge_steps, read_generations
from trainer.run import journal
from trainer.storage import ObjectStore

NOT_STARTED = "not started"
UNFINISHED = "unfinished"
"""It runs, waits for nodes, or was interrupted; only its scheduler knows whether it still has a job."""
DONE = "done"
ENDED_EARLY = "ended early"
"""It ended before its last step, and starts again only where that is requested."""
THREADS = 16
"""Of points, and of the objects of all points; both together are the connections that a store keeps (s3.CONNECTIONS)."""
T = TypeVar("T")


def read_outcomes(sweep: Sweep) -> list[str]:
    """Return NOT_STARTED, UNFINISHED, DONE or ENDED_EARLY of each point."""
    return _of_each(sweep, _read_outcome)


def read(sweep: Sweep) -> dict[str, Any]:
    """Return the sweep and its points as plain JSON data, best first; points without a validation loss keep their order."""
    rows = read_rows(sweep)
    rows.sort(key=lambda row: math.inf if row["best_validation_loss"] is None else row["best_validation_loss"])
    return {"sweep": sweep.store.uri.rstrip("/"), "points": rows}


def read_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the points as plain JSON data, in the order of the sweep."""
    return _of_each(sweep, _row)


def read_held_jobs(sweep: Sweep, data: Mapping[str, Any]) -> dict[str, HeldJob]:
    """Return the jobs that a scheduler holds until a person releases them, by the name of their point. UserError."""
    started = [row["name"] for row in data["points"] if row["outcome"] == UNFINISHED]
    if not started:
        return {}
    # Jobs are known by the URI that was requested, which may name a folder by a link.
    run = sweep.store.subfolder(started[0])
    request = read_record(run, journal.REQUEST) or {}
    backend: object = backends.load(str(request.get("on")))
    if not isinstance(backend, backends.ArrayBackend):
        return {}
    folder = registered_uri(request, run).rstrip("/").rpartition("/")[0]
    names = {f"{folder}/{point.name}": point.name for point in sweep.points}
    return {names[uri]: held for uri, held in backend.held_jobs(folder, [*names]).items()}


def with_held_jobs(data: Mapping[str, Any], held: Mapping[str, HeldJob]) -> dict[str, Any]:
    """Add the jobs of `read_held_jobs` to their points."""
    points = [
        {**row, "state": "held: a person has to release its job", "held": asdict(held[row["name"]])}
        if row["name"] in held
        else row
        for row in data["points"]
    ]
    return {**data, "points": points}


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
    by_reason: dict[str, list[HeldJob]] = {}
    for row in rows:
        if row["held"]:
            held = HeldJob(**row["held"])
            by_reason.setdefault(held.why, []).append(held)
    more = [f"{jobs[0]}{f'; so are {len(jobs) - 1} more' if jobs[1:] else ''}" for jobs in by_reason.values()]
    return table(heads, cells, right=("validation loss", "best")) + more


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


def _of_each(sweep: Sweep, read_point: Callable[[Sweep, Point, Executor], T]) -> list[T]:
    with (
        ThreadPoolExecutor(THREADS) as pool,
        ThreadPoolExecutor(THREADS) as objects,
        Progress("runs", len(sweep.points), "runs", brief=True) as progress,
    ):

        def counted(point: Point) -> T:
            result = read_point(sweep, point, objects)
            progress.advance()
            return result

        try:
            return list(pool.map(counted, sweep.points))
        except BaseException:
            # A run may have thousands of parts: whoever waits for the end waits for the requests under way alone.
            objects.shutdown(wait=False, cancel_futures=True)
            raise


def _read_outcome(sweep: Sweep, point: Point, pool: Executor) -> str:
    launches = journal.read_journal(sweep.store, f"{point.name}/", pool)
    if not launches.requested:
        return NOT_STARTED
    run = sweep.store.subfolder(point.name)
    return _outcome(run, launches, last_steps(run))[0]


def _outcome(run: ObjectStore, launches: journal.Journal, steps: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the outcome of a point that was started, and the state of its run, whose newest records are `steps`."""
    word, final = run_status.state_of(run, launches, steps), (EXIT_CONFIG, EXIT_LOST_RUN)
    if word == run_status.WORDS[EXIT_DONE]:
        return DONE, word
    # Runs on Kubernetes have no journal, only the words of their events.
    ended = word in (*(run_status.WORDS[code] for code in final), run_status.STOPPED)
    if not ended and launches.records and "ended" in launches.records[-1]:
        ended = logs.run_has_ended(launches, read_record(run, journal.REQUEST) or {})
    return (ENDED_EARLY if ended else UNFINISHED), word


def _row(sweep: Sweep, point: Point, pool: Executor) -> dict[str, Any]:
    launches = journal.read_journal(sweep.store, f"{point.name}/", pool)
    if launches.requested:
        run = sweep.store.subfolder(point.name)
        generations = read_generations(run, pool)
        newest = generations[max(generations)] if generations else []
        outcome, state = _outcome(run, launches, newest)
    else:
        generations, newest, outcome, state = {}, [], NOT_STARTED, NOT_STARTED
    return {
        "name": point.name,
        "run": f"{sweep.store.uri.rstrip('/')}/{point.name}",
        "values": dict(point.values),
        "outcome": outcome,
        "state": state,
        "held": None,
        **{key: newest[-1].get(key) if newest else None for key in ("step", "loss")},
        **validation_losses(merge_steps(generations)),
    }
