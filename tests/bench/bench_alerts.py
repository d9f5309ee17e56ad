"""From a fault to its alert: what the scene `alerts` measures, beside the time for which each rule itself waits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from infra.plan.watch.alert_rules import ALERTS
from tests.bench.harness import Row, run_bench
from tests.infra.test_alerts_live import FIGURE, TIME_SCALE
from tests.lab.training import ROOT
from tests.prove.run import read

TEST = "tests/infra/test_alerts_live.py"
MORE_S = 15.0
"""Allowed beyond the rule's own time: for scrapes and evaluations each second, windows of rates, and Alertmanager. Ours."""
THRESHOLD_S = {"RunStalled": 60.0, "StragglerData": 600.0}
"""Seconds, in full time, for which something has to last, at most, before the rule begins to wait. A mean over ten minutes is
by step: where steps were short before, as here, most of its window goes by until the slow ones outweigh them."""
FAULTS = {
    "StragglerData": "a rank that waits for its batches",
    "SavesFailing": "an S3 that refuses",
    "DiskFull": "a full file system",
    "RunStalled": "a rank that stands still",
    "NodeMissing": "a node cut from the network",
}


def measure(repetitions: int = 1) -> list[dict[str, Any]]:
    """One pass, which takes minutes, whatever `repetitions` says."""
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-alerts-") as name:
        results = Path(name, "results.jsonl")
        plug_in = ["-p", "tests.prove.results", "--scene-results", str(results)]
        # Its words go beside the bench's own, which are read.
        subprocess.run([sys.executable, "-m", "pytest", "-q", *plug_in, TEST], cwd=ROOT, stdout=sys.stderr, check=True)
        seconds: dict[str, float] = read(results).figures[FIGURE]  # type: ignore[assignment]
    return [row(name, seconds[name]).as_dict() for name in FAULTS]


def row(name: str, seconds: float) -> Row:
    waits_s = TIME_SCALE * (next(60 * one.minutes for one in ALERTS if one.name == name) + THRESHOLD_S.get(name, 0.0))
    return Row(
        f"{FAULTS[name]} -> a webhook hears {name}",
        seconds,
        waits_s + MORE_S,
        seconds / (waits_s + MORE_S),
        1.0,
        waits_s,
        "s",
        baseline_name="allowed",
        limit_name="the rule's own time",
        at_most=True,
        note=f"rules at {TIME_SCALE:.3f} of their times: the rule itself takes {waits_s / TIME_SCALE:.0f} s in full time",
    )


def main() -> int:
    return run_bench(measure)


if __name__ == "__main__":
    sys.exit(main())
