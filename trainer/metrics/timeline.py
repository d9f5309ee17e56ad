"""The history of a run by step: the data behind its figure. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import pairwise
from typing import Any

from trainer.errors import EXIT_REQUEUE
from trainer.metrics.goodput import by_step
from trainer.metrics.reader import Attempt

BEGAN = ("started", "resumed")
"""The events with which an attempt begins; their `step` is the one that it goes on from."""
COMMITTED = "checkpoint_committed"
"""The event of a commit; its `step` is the checkpoint's."""
PRUNED = "checkpoints_pruned"
"""The event of a pruning; `removed` holds the keys of the manifests that went."""
ROLLED_BACK = "rolled_back"
"""The event of a roll back; `from_attempt` is the generation whose last steps it undid."""


class Cut(Enum):
    """How an attempt came to its end before the run did."""

    NOTICE = "stopped on notice"
    LOST = "lost without notice"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class Span:
    """An attempt's share of the history: the steps (`first` to `last`) for which its records count."""

    generation: int
    first: int
    last: int
    world_size: int


@dataclass(frozen=True)
class Timeline:
    """Everything the figure shows; steps are global, in order, each once."""

    steps: list[int]
    loss: list[float]
    eval_steps: list[int]
    eval_loss: list[float]
    tokens_per_second: list[float]
    spans: list[Span]
    cuts: list[tuple[int, Cut]]
    """The last step of an interrupted attempt, and how it was interrupted."""
    resumes: list[int]
    """The step of each checkpoint that an attempt went on from."""
    saves: list[int]
    """Steps whose checkpoints were committed."""
    redone: list[tuple[int, int]]
    """First and last of the steps that an attempt had to compute although its predecessor had."""
    goodput: list[float]
    """Of the run up to each step, from 0 to 1; empty where records hold no times."""


def timeline(
    history: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    attempts: Sequence[Attempt],
    began: float | None = None,
) -> Timeline:
    """Put the merged step records, all events and the attempts that logged a step together; the run began at this Unix time,
    by hand with its first event."""
    attempts = with_stepless(attempts, events)
    if began is None:
        began = min((datetime.fromisoformat(e["time"]).timestamp() for e in events if "time" in e), default=None)
    evaluated = [record for record in history if "eval_loss" in record]
    return Timeline(
        steps=[int(record["step"]) for record in history],
        loss=[float(record.get("loss", "nan")) for record in history],
        eval_steps=[int(record["step"]) for record in evaluated],
        eval_loss=[float(record["eval_loss"]) for record in evaluated],
        tokens_per_second=[float(record.get("tokens_per_second", "nan")) for record in history],
        spans=spans(attempts),
        cuts=cuts(attempts, events),
        resumes=[attempt.first_step - 1 for attempt in attempts if attempt.first_step > 1],
        saves=sorted(
            {int(e["step"]) for e in events if e.get("event") == COMMITTED and isinstance(e.get("step"), int)}
        ),
        redone=[
            (after.first_step, before.last_step)
            for before, after in pairwise(attempts)
            if after.first_step <= before.last_step
        ],
        goodput=by_step(history, began),
    )


def with_stepless(attempts: Sequence[Attempt], events: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Return the attempts, and those that began but logged no step, whose last step is the one that they began from."""
    sizes: dict[Any, int] = {attempt.generation: attempt.world_size for attempt in attempts}
    known = set(sizes)
    stepless = {}
    for event in events:
        number, step, time = event.get("attempt"), event.get("step"), str(event.get("time", ""))
        size = int(event.get("world_size", 0))
        if is_roll_back := event.get("event") == ROLLED_BACK:
            # The same ranks go on.
            step, size = event.get("to_step"), sizes.get(event.get("from_attempt"), 0)
        begins = is_roll_back or event.get("event") in BEGAN
        if begins and number not in known and isinstance(number, int) and isinstance(step, int):
            stepless[number] = Attempt(number, step + 1, step, size, time, time)
            sizes[number] = size
    return sorted([*attempts, *stepless.values()], key=lambda attempt: attempt.generation)


def spans(attempts: Sequence[Attempt]) -> list[Span]:
    """Return the steps left to each attempt once its successors have repeated theirs; attempts without any are left out."""
    shares = []
    for number, attempt in enumerate(attempts):
        last = min([attempt.last_step, *(later.first_step - 1 for later in attempts[number + 1 :])])
        if last >= attempt.first_step:
            shares.append(Span(attempt.generation, attempt.first_step, last, attempt.world_size))
    return shares


def cuts(attempts: Sequence[Attempt], events: Sequence[Mapping[str, Any]]) -> list[tuple[int, Cut]]:
    """Return the attempts that were cut: they left with the requeue code, the run was rolled back from them, or the next began
    although they had not left."""
    codes = {event.get("attempt"): event.get("exit_code") for event in events if event.get("event") == "stopped"}
    rolled_back = {event.get("from_attempt") for event in events if event.get("event") == ROLLED_BACK}
    ends = []
    for number, attempt in enumerate(attempts):
        if codes.get(attempt.generation) == EXIT_REQUEUE:
            ends.append((attempt.last_step, Cut.NOTICE))
        elif attempt.generation in rolled_back:
            ends.append((attempt.last_step, Cut.ROLLED_BACK))
        elif attempt.generation not in codes and number + 1 < len(attempts):
            ends.append((attempt.last_step, Cut.LOST))
    return ends
