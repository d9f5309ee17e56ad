"""What a run did before this generation, from its own records: what goodput and counts of interruptions begin from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.launch import journal
from trainer.metrics.goodput import KeptSeconds
from trainer.metrics.reader import Attempt, iterate_generations, read_events
from trainer.metrics.timeline import Cut, cuts
from trainer.storage import ObjectStore


@dataclass(frozen=True)
class Past:
    """The run up to the step that a generation resumed from."""

    began: float | None
    """Unix seconds of the first launch, else of the first event; None where the run holds neither yet."""
    useful_s: float
    interruptions: int
    """How often a launch ended on a notice, or without a word before the run did."""


def read_past(store: ObjectStore, generation: int, step: int) -> Past:
    """Read all records of the generations before `generation`, which resumed from `step`; UserError where the store fails.

    A run has two parts of its log a minute: one of weeks takes minutes to read.
    """
    generations = iterate_generations(store, before=generation)
    return past(generations, read_events(store), journal.first_started(store), generation=generation, step=step)


def past(
    generations: Iterable[tuple[int, Iterable[Mapping[str, Any]]]],
    events: Iterable[Mapping[str, Any]],
    first_launch: float | None,
    *,
    generation: int,
    step: int,
) -> Past:
    """Sum up the generations before `generation`, oldest first; what they computed beyond `step` is done over."""
    kept, attempts = KeptSeconds(), []
    for number, records in generations:
        kept.begin_generation()
        first = last = 0
        for record in records:
            kept.add(record)
            last = int(record["step"])
            first = first or last
        if first:
            attempts.append(_attempt(number, first, last))
    known = list(events)
    # A further attempt is what shows that the last one of them did not reach the end.
    attempts.append(_attempt(generation, step + 1, step + 1))
    cut = cuts(attempts, known)
    return Past(run_began(first_launch, known), kept.total(step), sum(kind is not Cut.ROLLED_BACK for _, kind in cut))


def run_began(first_launch: float | None, events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return when a run began, in Unix seconds: with its first launch, by hand with its first event; None where it has not."""
    if first_launch is not None:
        return first_launch
    return min((journal.unix(event["time"]) for event in events if "time" in event), default=None)


def _attempt(generation: int, first: int, last: int) -> Attempt:
    return Attempt(generation, first, last, world_size=0, started="", ended="")
