"""`fab rehearse`."""

from __future__ import annotations

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task


@task(help={"steps": "optimizer steps of each run", "seed": "where the interruptions strike; chosen anew by default"})
def rehearse(_context: Context, steps: int = 150, seed: int | None = None) -> None:
    """Rehearse the journey on this machine: train, interrupt, resume, and prove that nothing was lost."""
    from rehearsal.__main__ import main

    words = ["--steps", str(steps)] + ([] if seed is None else ["--seed", str(seed)])
    code = main(words)
    if code:
        raise Exit("a promise was broken, see rehearsal/report.md", code)
