"""Benches that need a GPU: `make bench-gpu ONLY=plans`, and with DRY=1 what they would run, on any machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from lustrain.problem import USAGE, problem
from tests.bench import gpu_plans
from tests.bench.harness import machine, table

BENCHES = {"plans": gpu_plans}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a figure falls short of its bar, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME[,NAME]", help=f"some of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and the planned memory")
    args = parser.parse_args(argv)
    names = [name for name in args.only.split(",") if name] or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        print(
            problem("--only", ",".join(unknown), "there is no such bench", allowed=", ".join(BENCHES)), file=sys.stderr
        )
        return USAGE
    if not args.dry_run and not torch.cuda.is_available():
        why, fix = "torch sees no GPU", "run it where there is one, or --dry-run (make bench-gpu DRY=1)"
        print(problem("device", "cuda", why, fix=fix), file=sys.stderr)
        return USAGE
    short = False
    for name in names:
        bench = BENCHES[name]
        plans = bench.works()
        print("\n".join(bench.plan_lines(plans)), flush=True)
        if not args.dry_run:
            about = {**machine(), "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
            print(", ".join(f"{key} {value}" for key, value in about.items()))
            for rows in bench.measure(plans):
                print(table(rows), flush=True)
                short = short or not all(row["holds"] for row in rows)
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
