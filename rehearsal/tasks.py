"""`fab rehearse`."""

from __future__ import annotations

import secrets
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path

from lustrain.flags import flag, number
from lustrain.problem import FAILED, UserError
from lustrain.task import TaskResult, task

FOLDER = Path(__file__).parent
FEWEST_STEPS = 48
"""With fewer steps there is no room for a notice, a save after it, a kill and the remaining steps."""
FEWEST_STEPS_ON_SLURM = 100
"""With fewer, the second launch may be due to wait (`rehearsal.hold`) at a step that it never makes."""


@dataclass(frozen=True)
class RehearseFlags:
    steps: str = flag("150", "optimizer steps of each run (150)")
    seed: str | None = flag(None, "where the interruptions strike, a whole number; chosen anew by default")
    slurm: bool = flag(False, "train the run that is interrupted by the stack's own Slurm, on nodes made of namespaces")
    json: bool = flag(False, "print the outcome as one JSON object at the end")


@task("rehearse")
def rehearse(flags: RehearseFlags) -> TaskResult:
    """Rehearse the journey on this machine: train, interrupt, resume, and prove that nothing was lost."""
    from rehearsal.journey import StoppedError, as_dict, run_journey
    from rehearsal.report import markdown, show
    from rehearsal.scheduled import why_not

    steps = int(number("--steps", flags.steps, FEWEST_STEPS_ON_SLURM if flags.slurm else FEWEST_STEPS, 10**6))
    seed = secrets.randbelow(10**6) if flags.seed is None else int(number("--seed", flags.seed, 0, 10**9))
    if flags.slurm and (reason := why_not()):
        raise UserError(f"--slurm: {reason}")
    # What ends this program in another way than Ctrl-C takes the job, the nodes and the engine down too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usual = "some more than four to ten" if flags.slurm else "four to ten"
    print(f"rehearsal with seed {seed}: {usual} minutes on two cores", flush=True)
    report = FOLDER / ("report-slurm.md" if flags.slurm else "report.md")
    picture = report.with_suffix(".png")
    try:
        journey = run_journey(steps, seed, picture, slurm=flags.slurm)
    except StoppedError as stopped:
        if not stopped.expected:
            traceback.print_exception(stopped.__cause__)
        show(stopped.journey.stages, stopped.journey.promises)
        return TaskResult([], as_dict(stopped.journey) | {"kept": False}, stopped.exit_code, stopped.problems)
    show(journey.stages, journey.promises)
    report.write_text(markdown(journey.stages, journey.promises, seed=seed, picture=picture.name), encoding="utf-8")
    print(f"report: {report}")
    broken = not all(promise.kept for promise in journey.promises)
    lines = [f"a promise was broken, see rehearsal/{report.name}"] if broken else []
    return TaskResult(lines, as_dict(journey), FAILED if broken else 0)


TASKS = (rehearse,)
