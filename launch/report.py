"""One page about a run: its state, its attempts, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import status
from launch.runs import read_record
from lustrain.files import write_whole
from lustrain.problem import UserError, problem
from trainer.launch.journal import REQUEST, unix
from trainer.metrics.goodput import goodput, useful_seconds
from trainer.metrics.reader import merge_steps, read_events, read_generations
from trainer.run.past import run_began
from trainer.storage import ObjectStore

CAUSES: Mapping[int | None, str] = {75: "a lost node", 85: "a notice or a stop", None: "a lost launcher"}
"""Of the time between two attempts, by the exit code of the one before."""


@dataclass(frozen=True)
class Part:
    """Seconds of the run's whole time that went into one thing."""

    name: str
    seconds: float


def account(
    attempts: Sequence[Mapping[str, Any]], generations: Mapping[int, Sequence[Mapping[str, Any]]]
) -> list[Part]:
    """Divide the time from the first attempt's start to the last one's end; the parts add up to all of it. An attempt whose
    launcher was lost, and that trained on beside the next one, ends with the beginning of that.

    `generations` are the step records of each lease generation. What training a step took counts as progress where the run's
    history holds that record, and as repeated where a later attempt did the step over.
    """
    kept = {(record["step"], record["attempt"]) for record in merge_steps(generations)}
    parts: dict[str, float] = dict.fromkeys(("progress", "repeated steps", "saves", "starts", "ends of attempts"), 0.0)
    begun = [one["started"] for one in attempts] + [float("inf")]
    ended = [min(one["ended"], after) for one, after in zip(attempts, begun[1:], strict=True)]
    for number, one in enumerate(attempts):
        records = generations.get(one.get("generation") or 0, ())
        steps = {True: 0.0, False: 0.0}
        for record in records:
            steps[(record["step"], record["attempt"]) in kept] += record["step_seconds"] + record.get(
                "eval_seconds", 0.0
            )
        saves = sum(record["blocked_seconds"] for record in records)
        whole = ended[number] - one["started"]
        first = records[0]["step_seconds"] if records else 0.0
        start = max(0.0, min(one["start_s"] - first, whole)) if one.get("start_s") else whole
        spent = steps[True] + steps[False] + saves + start
        # What it did beside the next attempt is not told apart.
        share = whole / spent if spent > whole else 1.0
        parts["progress"] += share * steps[True]
        parts["repeated steps"] += share * steps[False]
        parts["saves"] += share * saves
        parts["starts"] += share * start
        parts["ends of attempts"] += whole - share * spent
        if number:
            why = f"between attempts, after {CAUSES.get(attempts[number - 1]['code'], 'a failure')}"
            parts[why] = parts.get(why, 0.0) + one["started"] - ended[number - 1]
    return [Part(name, seconds) for name, seconds in parts.items()]


def share_of_useful_steps(
    attempts: Sequence[Mapping[str, Any]], generations: Mapping[int, Sequence[Mapping[str, Any]]], began: float
) -> float | None:
    """Return the run's goodput from `began` to the end of its last launch, or by hand of its last step; None without steps."""
    in_order = [generations[number] for number in sorted(generations) if generations[number]]
    if not in_order:
        return None
    ended = max(one["ended"] for one in attempts) if attempts else unix(in_order[-1][-1]["time"])
    return goodput(useful_seconds(in_order), began, ended)


def make(store: ObjectStore, output: Path) -> tuple[list[str], dict[str, Any]]:
    """Write the page to `output` and the plot beside it; return the page's lines and its data. UserError."""
    if output.suffix != ".md":
        raise UserError(problem("--output", str(output), "is not a page", allowed="a name that ends with .md"))
    if not output.parent.is_dir():
        raise UserError(problem("--output", str(output), "is in no folder", fix=f"mkdir -p {output.parent}"))
    state = status.read(store, read_record(store, REQUEST))
    generations = read_generations(store)
    if not generations:
        raise UserError(problem("RUN", store.uri, "holds no step records yet", fix="wait for its first steps"))
    now = time.time()
    attempts = [one if "ended" in one else {**one, "ended": now, "code": None} for one in state["attempts"]]
    parts = account(attempts, generations)
    whole = sum(part.seconds for part in parts)
    began = run_began(attempts[0]["started"] if attempts else None, () if attempts else read_events(store))
    share = None if began is None else share_of_useful_steps(attempts, generations, began)
    rows = [(part.name, part.seconds, part.seconds / whole) for part in parts if part.seconds >= 0.05]
    picture = _picture(store, output.with_suffix(".png"))
    table = [
        "| where the time went | seconds | share |",
        "|---|---|---|",
        *(f"| {name} | {seconds:,.1f} | {part:.1%} |" for name, seconds, part in rows),
        f"| all | {whole:,.1f} | |",
    ]
    lines = [
        f"# {store.uri.rpartition('/')[2]}",
        "",
        *(f"- {line}" for line in status.lines(state)),
        *([f"- goodput {share:.1%}: steps that count, of the time since the run began"] if share is not None else []),
        "",
        *(table if attempts else ["It was started by hand: where the rest of the time went is not recorded."]),
        "",
        picture,
    ]
    write_whole(output, "\n".join(lines).encode() + b"\n")
    seconds = {part.name: part.seconds for part in parts}
    return lines, state | {"seconds": seconds, "goodput": share, "page": str(output)}


def _picture(store: ObjectStore, path: Path) -> str:
    """Draw the run; return the line that shows it, or says why there is none."""
    from trainer.metrics.plot import draw_run, output_problems

    if problems := output_problems(path):
        return f"No plot: {problems[0]}"
    draw_run(store, path)
    return f"![loss and throughput over the steps]({path.name})"
