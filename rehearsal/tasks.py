"""`fab rehearse`."""

from __future__ import annotations

from dataclasses import dataclass

from lustrain.flags import flag
from lustrain.task import Answer, task


@dataclass(frozen=True)
class Rehearse:
    steps: int = flag(150, "optimizer steps of each run")
    seed: int | None = flag(None, "where the interruptions strike; chosen anew by default")
    json: bool = flag(False, "print the outcome as one JSON object at the end")


@task("rehearse")
def rehearse(flags: Rehearse) -> Answer:
    """Rehearse the journey on this machine: train, interrupt, resume, and prove that nothing was lost."""
    from rehearsal import __main__ as rehearsal
    from rehearsal.journey import as_dict

    journey = rehearsal.rehearse(flags.steps, flags.seed)
    code = rehearsal.journey_exit(journey)
    return Answer(["a promise was broken, see rehearsal/report.md"] if code else [], as_dict(journey), code)


TASKS = (rehearse,)
