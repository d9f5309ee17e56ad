"""`python -m rehearsal`: the journey, its report, and exit code 1 if any promise broke."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from pathlib import Path

from rehearsal.journey import as_dict, travel
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
    if args.steps < FEWEST_STEPS:
        parser.error(f"--steps = {args.steps}: too few for two interruptions; allowed: >= {FEWEST_STEPS}")
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    print(f"rehearsal with seed {seed}: three to eight minutes on two cores", flush=True)
    picture = REPORT.with_suffix(".png")
    journey = travel(args.steps, seed, picture)
    show(journey.stages, journey.promises)
    REPORT.write_text(markdown(journey.stages, journey.promises, seed=seed, picture=picture.name), encoding="utf-8")
    broken = [promise for promise in journey.promises if not promise.kept]
    print(f"report: {REPORT}")
    if args.json:
        print(json.dumps(as_dict(journey)))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
