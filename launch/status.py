"""The state of a run, read from the run alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launch import backends
from launch.backends import HeldJob, PodBackend, RecordingBackend
from launch.runs import read_jobs, read_record, registered_uri, supervisor_is_gone
from lustrain.problem import UserError, plain
from trainer.checkpoint.format.layout import MANIFESTS, ManifestId
from trainer.errors import EXIT_CONFIG, EXIT_DONE, EXIT_LOST_RUN, EXIT_REQUEUE
from trainer.metrics.reader import last_steps, parts_of, read_part
from trainer.metrics.records import EVENTS
from trainer.run import journal
from trainer.storage import ObjectStore

WORDS: Mapping[int, str] = {
    EXIT_DONE: "done",
    EXIT_CONFIG: "refused: a person has to mend its settings",
    EXIT_REQUEUE: "interrupted, with a checkpoint",
    EXIT_LOST_RUN: "taken over by a newer job",
}
STOPPED = "stopped"
WITHOUT_LAUNCHER = "its launcher is gone"
ENDED = (WORDS[EXIT_DONE], STOPPED)
"""States in which the run needs no job."""
SILENT_S = 120.0
"""Seconds without a record of a step (`metrics.flush_s` is 30) after which a run is not known to train."""


def read(store: ObjectStore, request: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state as plain JSON data; times are Unix seconds by the store's clock, ages seconds.

    `request` is the run's request record, None without one.
    """
    launches = journal.read_journal(store)
    steps = last_steps(store)
    last = steps[-1] if steps else {}
    now = store.now()
    commits = [
        (manifest, now - info.modified)
        for info in store.list(MANIFESTS)
        if (manifest := ManifestId.of_key(info.key)) is not None
    ]
    newest = max(commits, default=None)
    return {
        "run": store.uri,
        "on": request and request.get("on"),
        "state": state_of(store, launches, steps),
        "step": last.get("step"),
        "loss": last.get("loss"),
        "tokens_per_second": last.get("tokens_per_second"),
        "world_size": last.get("world_size"),
        "last_step_age_s": _age_s(steps),
        "committed_step": newest and newest[0].step,
        "last_commit_age_s": newest and newest[1],
        "submitted": read_jobs(store),
        "held": None,
        "ended_job": None,
        "supervisor_is_gone": False,
        "pods": [],
        "attempts": launches.records,
    }


def read_with_backend(store: ObjectStore, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the same with what the run's backend knows of its job; `warn` gets a line where that does not answer."""
    request = read_record(store, journal.REQUEST)
    state = read(store, request)
    name = str(state["on"])
    backend = backends.load(name)
    if backend is None or state["state"] in ENDED:
        return state
    run, job = registered_uri(request, store), state["submitted"].get(name)
    pods = None
    try:
        if isinstance(backend, PodBackend) and job:
            pods = backend.pods(run, job)
            state["pods"] = [asdict(pod) for pod in pods or ()]
        state = with_held_job(state, backend.held_job(run))
        if isinstance(backend, RecordingBackend) and job:
            state["ended_job"] = backend.ended_job(run, job)
    except UserError as error:
        warn(str(error))
    if request is not None and supervisor_is_gone(request):
        state = with_lost_supervisor(state, pods_are_known=pods is not None)
    return state


def state_of(store: ObjectStore, launches: journal.Journal, steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the state of a run in words; `steps` are its newest step records."""
    age = _age_s(steps)
    return _state(launches.records, launches.stopped, age) if launches.records else _by_events(store, age)


def with_held_job(state: Mapping[str, Any], held: HeldJob | None) -> dict[str, Any]:
    """Add the job that the scheduler holds, if there is one: the run goes on once a person has released it."""
    if held is None:
        return dict(state)
    text = f"held by {str(state['on']).capitalize()}: a person has to release its job"
    return {**state, "state": text, "held": asdict(held)}


def with_lost_supervisor(state: Mapping[str, Any], *, pods_are_known: bool) -> dict[str, Any]:
    """Add that the process which supervised the run is gone, unless its last launch has ended as recorded: then it may have
    left as it should."""
    last = state["attempts"][-1] if state["attempts"] else None
    if last is not None and "ended" in last:
        return dict(state)
    unmade = last is not None and pods_are_known and last["attempt"] not in [pod["launch"] for pod in state["pods"]]
    return {**state, "supervisor_is_gone": True} | ({"state": WITHOUT_LAUNCHER} if unmade else {})


def lines(state: Mapping[str, Any]) -> list[str]:
    """Return the state for people."""
    shown = [f"{state['run']}: {state['state']}"]
    if state["step"] is not None:
        speed, loss = state["tokens_per_second"], state["loss"]
        shown.append(f"step {state['step']}, loss {loss:.4f}, {speed:,.0f} tokens/s, {state['world_size']} ranks")
    if state["committed_step"] is not None:
        shown.append(f"checkpoint of step {state['committed_step']}, {_ago(state['last_commit_age_s'])} ago")
    jobs = ((backends.load(name), job) for name, job in state["submitted"].items())
    shown += [backend.describe(job) for backend, job in jobs if backend is not None]
    if held := state["held"]:
        shown.append(str(HeldJob(**held)))
    shown += [f"its job has ended: {state['ended_job']}"] if state["ended_job"] else []
    if state["supervisor_is_gone"]:
        shown.append("no fab train supervises it; next: the same fab train with --resume")
    shown += [
        f"pod {pod['name']}{' on ' + pod['node'] if pod['node'] else ''}: {plain(pod['state'])}"
        for pod in state["pods"]
    ]
    return shown + [_launch(record) for record in state["attempts"]]


def _state(attempts: Sequence[Mapping[str, Any]], stopped: bool, age: float | None) -> str:
    last = attempts[-1]
    if "ended" not in last:
        quiet = _quiet_s(last, age)
        state = "running" if quiet < SILENT_S else f"running, but silent for {_ago(quiet)}"
        return f"{state}; stop requested" if stopped else state
    code = last["code"]
    if stopped and code == EXIT_REQUEUE:
        return STOPPED
    return WORDS.get(code, WITHOUT_LAUNCHER if code is None else f"the last launch ended with {code}")


def is_silent(store: ObjectStore, launch: Mapping[str, Any]) -> bool:
    """Whether a launch without an end has recorded no step for `SILENT_S`."""
    return _quiet_s(launch, _age_s(last_steps(store))) >= SILENT_S


def last_sign(store: ObjectStore, request: Mapping[str, Any]) -> float:
    """Return when the run last was requested, began or ended a launch, or made a step, in Unix seconds."""
    records, steps = journal.read(store), last_steps(store)
    times = [float(request.get(journal.REQUESTED_AT) or 0.0)]
    times += [float(records[-1].get("ended") or records[-1]["started"])] if records else []
    return max([*times, *(journal.unix(one["time"]) for one in steps[-1:])])


def _age_s(steps: Sequence[Mapping[str, Any]]) -> float | None:
    return time.time() - journal.unix(steps[-1]["time"]) if steps else None


def _quiet_s(launch: Mapping[str, Any], age: float | None) -> float:
    since_start = time.time() - float(launch["started"])
    return since_start if age is None else min(age, since_start)


def _by_events(store: ObjectStore, age: float | None) -> str:
    """Return the state of a run without a supervisor of ours: started by hand, or under Kubernetes."""
    parts = parts_of(store, EVENTS)
    events = read_part(store, parts[max(parts)][-1]) if parts else []
    ends = [one["exit_code"] for one in events if one["event"] == "stopped"]
    if ends:
        return WORDS.get(ends[-1], "ended")
    if age is None:
        return "starting" if events else "requested, no rank has started yet"
    return "running" if age < SILENT_S else f"silent for {_ago(age)}"


def _launch(record: Mapping[str, Any]) -> str:
    where = f"launch {record['attempt']} on {', '.join(record['nodes'])}"
    if "ended" not in record:
        idle = f"; idle, and paid for: {', '.join(record['idle'])}" if record.get("idle") else ""
        return f"{where}: since {_ago(time.time() - record['started'])}{idle}"
    parts = [f"code {record['code']}", f"{record.get('gained', 0)} steps committed"]
    parts += [f"{why} {', '.join(record[why])}" for why in ("blamed", "noticed") if record.get(why)]
    parts += [record[journal.ERROR]] if record.get(journal.ERROR) else []
    return f"{where}: {'; '.join(parts)}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
