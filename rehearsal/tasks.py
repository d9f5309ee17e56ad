"""`fab rehearse`."""

from __future__ import annotations

from dataclasses import dataclass

from lustrain.task import Answer, flag, task


@dataclass(frozen=True)
class Rehearse:
    steps: int = flag(150, "optimizer steps of each run")
    seed: int | None = flag(None, "where the interruptions strike; chosen anew by default")


@task("rehearse")
def rehearse(flags: Rehearse) -> Answer:
    """Rehearse the journey on this machine: train, interrupt, resume, and prove that nothing was lost."""
    from rehearsal.__main__ import main

    words = ["--steps", str(flags.steps)] + ([] if flags.seed is None else ["--seed", str(flags.seed)])
    code = main(words)
    return Answer((), None, code, ("a promise was broken, see rehearsal/report.md",) if code else ())


TASKS = (rehearse,)
