"""What a run has printed: all of it, or that of one rank or launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launch import backends, runs, status
from launch.backends import LogLine
from launch.report import GONE_S
from launch.supervisor.loop import MAX_WAIT_S
from launch.supervisor.policy import RestartPolicy, final_decision, launch_of
from lustrain.problem import UserError, plain, problem
from lustrain.progress import duration_text, print_line
from trainer.node.output import parse
from trainer.run import journal
from trainer.storage import ObjectStore

POLL_S = 2.0
LOOKS_PER_QUEUE = 15
"""Looks at the log for one at the scheduler's queue, which many users share."""


@dataclass(frozen=True)
class Entry:
    """One printed line. `rank` is None where a launcher or the supervisor printed it, `launch` where it is not known."""

    source: str
    launch: int | None
    rank: int | None
    text: str

    def shown(self) -> str:
        """Return it for people."""
        launch = f"launch {self.launch} " if self.launch is not None else ""
        rank = "" if self.rank is None else f"[{launch}rank {self.rank}] "
        return f"{f'{self.source}: ' if self.source else ''}{rank}{plain(self.text)}"


def entries(lines: Iterable[LogLine], rank: int | None = None, launch: int | None = None) -> Iterator[Entry]:
    """Yield the lines of one rank or launch, or all; a line without a mark belongs to the launch before it in its log."""
    current: dict[str, int] = {}
    for line in lines:
        marked, of_rank, text = parse(line.text)
        if marked is not None and line.launch is None:
            current[line.source] = marked
        # A node has logs of one launch each, and that of a supervisor beside them.
        entry = Entry(line.source, line.launch or current.get(line.source), of_rank, text)
        if (rank is None or of_rank == rank) and (launch is None or entry.launch == launch):
            yield entry


def read(
    store: ObjectStore,
    request: Mapping[str, Any] | None,
    *,
    rank: int | None,
    launch: int | None,
    follow: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Entry]:
    """Yield what the run printed, with `follow` until it has ended. UserError where nothing is kept."""
    name = str((request or {}).get("on"))
    backend = backends.load(name)
    if backend is None:
        why = f"there is no backend {name} here" if request else "it was not started by fab train, which keeps the log"
        raise UserError(problem("RUN", store.uri, why, fix="look where its ranks print"))
    job = runs.read_jobs(store).get(name)
    looks, named = 0, ""

    def print_held_job() -> None:
        """Say once that the scheduler holds the job, or that this is not known."""
        nonlocal named
        try:
            held = str(backend.held_job(runs.registered_uri(request, store)) or "")
        except UserError as error:
            held = str(error)
        if held and held != named:
            print_line(held)
        named = held

    def more() -> bool:
        nonlocal looks
        if not follow:
            return False
        if looks:
            sleep(POLL_S)
        looks += 1
        current = runs.read_record(store, journal.REQUEST) or {}
        if has_ended(store, current, launch):
            return False
        why = abandoned(store, current)
        if why:
            print_line(why)
        elif looks % LOOKS_PER_QUEUE == 1:
            print_held_job()
        return not why

    yield from entries(backend.read_log(runs.registered_uri(request, store), job, launch, more), rank, launch)


def check_part(store: ObjectStore, request: Mapping[str, Any] | None, rank: int | None, launch: int | None) -> None:
    """Refuse a rank or launch that the run does not have; where its records do not tell, it may have it. UserError."""
    request, records = request or {}, journal.read(store)
    numbers = [record["attempt"] for record in records]
    fix = f"fab status {runs.registered_uri(request, store)} shows its launches"
    if launch is not None and numbers and launch not in numbers:
        raise UserError(
            problem("--launch", launch, "the run has no such launch", allowed=f"1 to {numbers[-1]}", fix=fix)
        )
    chosen = [record for record in records if launch in (None, record["attempt"])]
    nodes = max((len(record["nodes"]) for record in chosen), default=(request.get("nodes") or {}).get("most", 0))
    ranks = nodes * request.get("ranks", 0)
    if rank is not None and ranks and rank >= ranks:
        raise UserError(problem("--rank", rank, "the run has no such rank", allowed=f"0 to {ranks - 1}", fix=fix))


def has_ended(store: ObjectStore, request: Mapping[str, Any], launch: int | None = None) -> bool:
    """Whether nothing more will be printed: the run, or the launch that is named, has ended."""
    launches = journal.read_journal(store)
    if launch is not None and any(record["attempt"] == launch and "ended" in record for record in launches.records):
        return True
    return run_has_ended(launches, request)


def run_has_ended(launches: journal.Journal, request: Mapping[str, Any]) -> bool:
    """Whether the run starts again only once it is requested again."""
    records = launches.records
    if not records or "ended" not in records[-1]:
        return False
    after = int(request.get("after", 0))
    history = [launch_of(record) for record in records if record["attempt"] > after]
    stop = "fab stop" if launches.stopped else ""
    return bool(history) and final_decision(RestartPolicy(), history, time.time(), stop) is not None


def abandoned(store: ObjectStore, request: Mapping[str, Any]) -> str:
    """Return why nothing more will be printed of a run that has not ended; empty where that is not known."""
    if host := runs.supervising_host(request):
        # A supervisor that lives starts a launch, or gives up, within that time.
        longest_s = max(float(request.get("give_up_s") or MAX_WAIT_S), GONE_S)
        silent_s = time.time() - status.last_sign(store, request)
        why = (
            f"the run is silent for {duration_text(silent_s)}, and process {request.get('pid')} of {host} supervised it"
        )
        return f"{why}; fix: fab train … --resume" if silent_s > longest_s else ""
    if not runs.supervisor_is_gone(request):
        return ""
    records = journal.read(store)
    if records and "ended" not in records[-1] and not status.is_silent(store, records[-1]):
        return ""
    return f"the run is silent, and process {request['pid']}, which supervised it, is gone; fix: fab train … --resume"
