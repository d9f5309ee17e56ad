"""What a run did before this generation, from its own records: what goodput and counts of interruptions begin from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.metrics.goodput import KeptSeconds
from trainer.metrics.reader import Attempt, iterate_generations, read_events
from trainer.metrics.timeline import Cut, cuts
from trainer.run import journal
from trainer.storage import ObjectStore


@dataclass(frozen=True)
class Past:
    """The run up to the step that a generation resumed from."""

    began: float | None
    """Unix seconds of the first launch, else of the first event; None where the run holds neither yet."""
    useful_s: float
    interruptions: int
    """How often a generation ended on a notice, or without a word before the run did, be it before its first step."""


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
    kept = KeptSeconds()
    for _, records in generations:
        kept.begin_generation()
        for record in records:
            kept.add(record)
    known = list(events)
    # Each number was a start that took the run, though one that was killed at once left no record at all.
    cut = cuts([_attempt(number) for number in range(1, generation + 1)], known)
    return Past(run_began(first_launch, known), kept.total(step), sum(kind is not Cut.ROLLED_BACK for _, kind in cut))


def run_began(first_launch: float | None, events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return when a run began, in Unix seconds: with its first launch, by hand with its first event; None where it has not."""
    if first_launch is not None:
        return first_launch
    return min((journal.unix(event["time"]) for event in events if "time" in event), default=None)


def _attempt(generation: int) -> Attempt:
    """Return what `cuts` counts by: the generation alone."""
    return Attempt(generation, first_step=0, last_step=0, world_size=0, started="", ended="")
