"""One page about a run: its state, its launches, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch import status
from launch.report_page import Page, html, markdown, text
from launch.runs import read_record
from lustrain.files import write_whole
from lustrain.problem import UserError, problem
from lustrain.progress import duration_text
from trainer.errors import EXIT_PEERS, EXIT_REQUEUE
from trainer.metrics.alerts import Firing, names, read_firings
from trainer.metrics.goodput import goodput, useful_seconds
from trainer.metrics.reader import merge_steps, read_events, read_generations
from trainer.run.journal import REQUEST, launch_result, unix
from trainer.run.past import run_began
from trainer.storage import ObjectStore

NOTICE, STOP, GROWTH = "a notice", "a stop", "growth"
CAUSES: Mapping[int | None, str] = {EXIT_PEERS: "a lost node", EXIT_REQUEUE: STOP, None: "a lost launcher"}
"""Why time passed between two launches, by the exit code of the one before; a stop that follows a notice of AWS is NOTICE, and
one that makes way for more nodes GROWTH."""
ENDS, BETWEEN = "ends and rollbacks", "between launches"
"""Parts of a run's time: what is left of its launches, and what passed between them."""
SUFFIXES = (".md", HTML := ".html")
HEADS = ("where the time went", "seconds", "share")
GONE_S = 3600.0
"""Seconds without a record of a step or an event after which the launcher of a launch without an end is taken for gone. Starts
and saves write one much sooner."""


@dataclass(frozen=True)
class Part:
    """Seconds of the run's whole time that went into one thing."""

    name: str
    seconds: float


def with_ends(
    store: ObjectStore,
    launches: Sequence[Mapping[str, Any]],
    generations: Mapping[int, Sequence[Mapping[str, Any]]],
    now: float,
) -> list[dict[str, Any]]:
    """Return the journal's launches as `account` needs them: each with all its lease generations, its result and an end.

    A launch that the journal has no end of ends `now`, in Unix seconds. One whose launcher is gone ends with its last record,
    where that is more than `GONE_S` before the end that its successor or this function gave it; without a successor `silent_s`
    says how old the record is.
    """
    events = read_events(store)
    return [_with_end(store, launch, events, generations, now) for launch in launches]


def _with_end(
    store: ObjectStore,
    launch: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    generations: Mapping[int, Sequence[Mapping[str, Any]]],
    now: float,
) -> dict[str, Any]:
    own_events = [event for event in events if event.get("launch_attempt") == launch["attempt"]]
    own_generations = sorted({int(event["attempt"]) for event in own_events})
    known = {**launch, "generations": own_generations} if own_generations else dict(launch)
    is_open = "ended" not in launch
    if is_open:
        known |= launch_result(store, launch) | {"ended": now, "code": None}
    if known["code"] is not None:
        return known
    records = [*own_events, *(generations[number][-1] for number in own_generations if generations.get(number))]
    last = max([launch["started"], *(unix(record["time"]) for record in records)])
    if known["ended"] - last <= GONE_S:
        return known | {"ended": max(known["ended"], last)}
    return known | {"ended": last} | ({"silent_s": now - last} if is_open else {})


def lost_launchers(launches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each launch that `with_ends` has ended with its last record."""
    return [
        f"launch {launch['attempt']} has written nothing for {duration_text(launch['silent_s'])}: its launcher is gone, and "
        "the launch counts until its last record"
        for launch in launches
        if "silent_s" in launch
    ]


def account(
    launches: Sequence[Mapping[str, Any]], generations: Mapping[int, Sequence[Mapping[str, Any]]]
) -> list[Part]:
    """Divide the time from the first launch's start to the last one's end; the parts add up to all of it. A launch whose
    launcher was lost, and that trained on beside the next one, ends with the beginning of that.

    `generations` are the step records of each lease generation; a launch names its own as `generations`, or its newest as
    `generation`. What training a step took counts as progress where the run's history holds that record, and as repeated where
    a later generation did the step over.
    """
    kept = {(record["step"], record["attempt"]) for record in merge_steps(generations)}
    parts: dict[str, float] = dict.fromkeys(("progress", "repeated steps", "saves", "starts", ENDS), 0.0)
    begun = [launch["started"] for launch in launches] + [float("inf")]
    ended = [min(launch["ended"], after) for launch, after in zip(launches, begun[1:], strict=True)]
    for index, launch in enumerate(launches):
        own = launch.get("generations") or [launch.get("generation") or 0]
        records = [record for number in own for record in generations.get(number, ())]
        steps = {True: 0.0, False: 0.0}
        for record in records:
            steps[(record["step"], record["attempt"]) in kept] += record["step_seconds"] + record.get(
                "eval_seconds", 0.0
            )
        saves = sum(record["blocked_seconds"] for record in records)
        whole = ended[index] - launch["started"]
        first = records[0]["step_seconds"] if records else 0.0
        start = max(0.0, min(launch["start_s"] - first, whole)) if launch.get("start_s") else whole
        spent = steps[True] + steps[False] + saves + start
        # What it did beside the next launch is not shown apart.
        share = whole / spent if spent > whole else 1.0
        parts["progress"] += share * steps[True]
        parts["repeated steps"] += share * steps[False]
        parts["saves"] += share * saves
        parts["starts"] += share * start
        parts[ENDS] += whole - share * spent
        if index:
            why = f"{BETWEEN}, after {cause_of_end(launches[index - 1])}"
            parts[why] = parts.get(why, 0.0) + launch["started"] - ended[index - 1]
    return [Part(name, seconds) for name, seconds in parts.items()]


def cause_of_end(launch: Mapping[str, Any]) -> str:
    """Return why a launch ended, for people."""
    cause = CAUSES.get(launch["code"], "a failure")
    if cause != STOP:
        return cause
    return NOTICE if launch.get("noticed") else GROWTH if launch.get("grows_to") else STOP


def share_of_useful_steps(
    launches: Sequence[Mapping[str, Any]], generations: Mapping[int, Sequence[Mapping[str, Any]]], began: float
) -> float | None:
    """Return the run's goodput from `began` to the end of its last launch, or by hand of its last step; None without steps."""
    in_order = [generations[number] for number in sorted(generations) if generations[number]]
    if not in_order:
        return None
    ended = max(launch["ended"] for launch in launches) if launches else unix(in_order[-1][-1]["time"])
    return goodput(useful_seconds(in_order), began, ended)


def make(store: ObjectStore, output: Path, prometheus: str | None = None) -> tuple[list[str], dict[str, Any]]:
    """Write the page to `output`, and with Markdown the plot beside it; return the page's lines and its data. UserError.

    `prometheus` is the address of one that knows which alerts fired meanwhile.
    """
    if output.suffix not in SUFFIXES:
        allowed = f"a name that ends with {' or '.join(SUFFIXES)}"
        raise UserError(problem("--output", str(output), "is not a page", allowed=allowed))
    if not output.parent.is_dir():
        raise UserError(problem("--output", str(output), "is in no folder", fix=f"mkdir -p {output.parent}"))
    state = status.read(store, read_record(store, REQUEST))
    generations = read_generations(store)
    if not generations:
        raise UserError(problem("RUN", store.uri, "holds no step records yet", fix="wait for its first steps"))
    launches = with_ends(store, state["attempts"], generations, time.time())
    parts = account(launches, generations)
    whole = sum(part.seconds for part in parts)
    began = run_began(launches[0]["started"] if launches else None, () if launches else read_events(store))
    share = None if began is None else share_of_useful_steps(launches, generations, began)
    name = store.uri.rstrip("/").rpartition("/")[2]
    fired = None if prometheus is None else _alerts(prometheus, name, launches, generations, began)
    facts = [*status.lines(state), *lost_launchers(launches)]
    facts += [] if share is None else [f"goodput {share:.1%}: steps that count, of the time since the run began"]
    facts += [] if fired is None else [f"alerts: {_alerts_text(fired)}"]
    picture, without_picture = _picture(store, output, began, fired)
    page = Page(
        name,
        tuple(facts),
        HEADS,
        _rows(parts, whole) if launches else (),
        "It was started by hand: where the rest of the time went is not recorded.",
        picture,
        without_picture,
    )
    lines = _write(page, output)
    seconds = {part.name: part.seconds for part in parts}
    data = state | {"seconds": seconds, "goodput": share, "page": str(output)}
    return lines, data if fired is None else data | {"alerts": [asdict(one) for one in fired]}


def _rows(parts: Sequence[Part], whole: float) -> tuple[tuple[str, ...], ...]:
    rows = [
        (part.name, f"{part.seconds:,.1f}", f"{part.seconds / whole:.1%}") for part in parts if part.seconds >= 0.05
    ]
    return (*rows, ("all", f"{whole:,.1f}", ""))


def _write(page: Page, output: Path) -> list[str]:
    """Write the page, and the picture that Markdown shows; return the lines for a terminal. OSError."""
    if output.suffix == HTML:
        write_whole(output, html(page).encode())
        return text(page)
    beside = output.with_suffix(".png")
    lines = markdown(page, beside.name)
    if page.picture is not None:
        write_whole(beside, page.picture)
    write_whole(output, "\n".join(lines).encode() + b"\n")
    return lines


def _alerts(
    prometheus: str,
    run: str,
    launches: Sequence[Mapping[str, Any]],
    generations: Mapping[int, Sequence[Mapping[str, Any]]],
    began: float | None,
) -> list[Firing]:
    """Return the alerts from the begin of the run to the end of its last launch, by hand to its last record. UserError."""
    ends = [launch["ended"] for launch in launches]
    ends = ends or [unix(records[-1]["time"]) for records in generations.values() if records]
    times = [*ends, *([] if began is None else [began])]
    return read_firings(prometheus, run, min(times), max(times)) if times else []


def _alerts_text(fired: Sequence[Firing]) -> str:
    """Say how often each alert fired, and for how long in all."""
    texts = []
    for name in names(fired):
        spans = [one.ended - one.began for one in fired if one.alert == name]
        texts.append(f"{name} {len(spans)} x, {duration_text(sum(spans))}")
    return "; ".join(texts) or "none fired"


def _picture(
    store: ObjectStore, output: Path, began: float | None, fired: Sequence[Firing] | None
) -> tuple[bytes | None, str]:
    """Draw the run as PNG; None where it cannot be drawn, and why."""
    from trainer.metrics.plot import output_problems, png, run_figure

    if problems := output_problems(output.with_suffix(".png")):
        return None, f"No plot: {problems[0]}"
    return png(run_figure(store, began=began, alerts=fired)[1]), ""
