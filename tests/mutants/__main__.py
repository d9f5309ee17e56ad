"""Plant small faults in the product, one at a time, and see which ones `make test` finds: `python -m tests.mutants`.

The same seed draws the same faults, so that a change of the tests can be judged: it must find at least as many.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.sites import Mutant, draw

ROOT = Path(__file__).parents[2]
PURE: Mapping[str, tuple[str, ...]] = {
    "agent": ("node_setup/agent/**/*.py",),
    "checkpoint": ("trainer/checkpoint/**/*.py",),
    "images": ("images/plan/**/*.py", "images/check/**/*.py"),
    "launch": ("launch/**/*.py", "trainer/node/*.py", "trainer/run/journal.py"),
    "plan": ("infra/plan/**/*.py", "infra/config.py", "infra/groups.py"),
    "preflight": ("infra/preflight/**/*.py", "infra/policy/*.py"),
    "trainer": (
        "trainer/data/**/*.py",
        "trainer/interrupt/*.py",
        "trainer/metrics/*.py",
        "trainer/parallel/agree.py",
        "trainer/parallel/shards.py",
        "trainer/parallel/votes.py",
        "trainer/step/*.py",
        "trainer/*.py",
    ),
}
TESTS: Mapping[str, tuple[str, ...]] = {
    "node_setup": ("tests/node_setup", "tests/test_golden.py"),
    "infra": ("tests/infra", "tests/test_golden.py"),
    "images": ("tests/images", "tests/test_golden.py"),
    "launch": ("tests/launch",),
    "trainer/checkpoint": ("tests/checkpoint", "tests/trainer"),
    "trainer/node": ("tests/launch", "tests/trainer"),
    "trainer/run": ("tests/launch", "tests/trainer"),
    "trainer": ("tests/trainer", "tests/data", "tests/interrupt", "tests/metrics", "tests/checkpoint"),
}
"""Tests that are tried for a file, by the beginning of its path: of `make test`, those that are about it."""
LIMIT_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="how many faults (60)")
    parser.add_argument("--seed", type=int, default=23, help="which ones are drawn (23)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of pytest (one a core)")
    parser.add_argument("--report", type=Path, help="write a JSON list of what became of each")
    flags = parser.parse_args(argv)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="lustrain-mutants-") as name:
        copied = Path(name, "main")
        _copy(copied)
        for number, mutant in enumerate(draw(ROOT, PURE, flags.count, flags.seed), 1):
            began = time.monotonic()
            found_by = _found_by(copied, mutant, flags.processes)
            rows.append({**vars(mutant), "found_by": found_by, "seconds": round(time.monotonic() - began)})
            change = f"{mutant.before!r} -> {mutant.after!r}"
            print(f"{number}: {mutant.file}:{mutant.line}: {change[:120]}: {found_by or 'SURVIVES'}", flush=True)
            if flags.report:
                flags.report.write_text(json.dumps(rows, indent=1))
    print(f"{sum(bool(row['found_by']) for row in rows)} of {len(rows)} found, seed {flags.seed}")
    return 0


def _copy(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file)
    # Tests ask git for the files of the repository.
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=target, check=True)


def _found_by(copied: Path, mutant: Mutant, processes: int) -> str | None:
    """The first test that fails with this fault in the copy; "no end" where they hang; None where all pass."""
    path = copied / mutant.file
    sound = path.read_bytes()
    path.write_bytes(mutant.applied(sound))
    tests = next(tests for start, tests in sorted(TESTS.items(), reverse=True) if mutant.file.startswith(f"{start}/"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        str(processes),
        "-m",
        "not scene and not torture",
        *tests,
    ]
    variables = {**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copied, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end"
    finally:
        path.write_bytes(sound)
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0].split(" ", 1)[1] if failed else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
