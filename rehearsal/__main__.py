"""`python -m rehearsal`: the journey, its report, and exit code 1 if any promise broke."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from pathlib import Path

from lustrain.problem import DONE, FAILED, UserError, problem
from rehearsal.journey import Journey, as_dict, travel
from rehearsal.report import markdown, show

REPORT = Path(__file__).with_name("report.md")
FEWEST_STEPS = 48
"""Fewer leave no room for a notice, a save after it, a kill and a rest."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rehearsal", description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument("--seed", type=int, help="where the interruptions strike; default: chosen anew, and printed")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object at the end")
    args = parser.parse_args(argv)
    try:
        journey = rehearse(args.steps, args.seed)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(as_dict(journey)))
    return journey_exit(journey)


def rehearse(steps: int, seed: int | None = None) -> Journey:
    """Play the journey, print how each stage ends, and write the report. UserError for too few steps."""
    if steps < FEWEST_STEPS:
        raise UserError(problem("--steps", steps, "too few for two interruptions", allowed=f">= {FEWEST_STEPS}"))
    seed = secrets.randbelow(10**6) if seed is None else seed
    print(f"rehearsal with seed {seed}: three to eight minutes on two cores", flush=True)
    picture = REPORT.with_suffix(".png")
    journey = travel(steps, seed, picture)
    show(journey.stages, journey.promises)
    REPORT.write_text(markdown(journey.stages, journey.promises, seed=seed, picture=picture.name), encoding="utf-8")
    print(f"report: {REPORT}")
    return journey


def journey_exit(journey: Journey) -> int:
    return DONE if all(promise.kept for promise in journey.promises) else FAILED


if __name__ == "__main__":
    sys.exit(main())
