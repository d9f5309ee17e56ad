"""How far plans are from what is measured: memory beside fake tensors and real ranks, and the laws beside published figures.

The goodput of a run with real kills takes longer than a bench should: the scene `planner` measures it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from planner.memory import CPU, memory
from tests.bench.harness import Row, run_bench
from tests.fork_server import ForkServer
from tests.planner.fake_training import CASES, a_rank_of_eight, admitted_error, peak_bytes
from tests.planner.published import PUBLISHED
from tests.planner.real_ranks import SHAPE, STRATEGIES, label, measured_peaks, work_of

REAL_RANKS_WITHIN = 0.1
"""What docs/plan.md promises of them."""
WORKERS = f"real ranks, width {SHAPE.width}, {SHAPE.layers} blocks"


def measure(repetitions: int = 1) -> list[dict[str, Any]]:
    """One pass, whatever `repetitions` says: bytes and laws are the same each time."""
    return [row.as_dict() for row in (*law_rows(), *fake_rows(), *real_rows())]


def law_rows() -> list[Row]:
    return [row(one.name, one.predict(), one.figure, "published", one.within) for one in PUBLISHED]


def fake_rows() -> list[Row]:
    with a_rank_of_eight():
        return [
            memory_row(
                f"fake tensors, {name}",
                memory(work, strategy, CPU).total,
                peak_bytes(work, strategy),
                admitted_error(work),
            )
            for name, work, strategy in CASES
        ]


def real_rows() -> list[Row]:
    """Of each strategy the rank that is farthest from its plan."""
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-planner-") as name:
        folder = Path(name)
        server = ForkServer(folder)
        try:
            rows = []
            for strategy in STRATEGIES:
                planned = memory(work_of(strategy), strategy, CPU).total
                peaks = [peak.total for peak in measured_peaks(server, folder, strategy)]
                farthest = max(peaks, key=lambda peak: abs(planned / peak - 1))
                rows.append(memory_row(f"{WORKERS}, {label(strategy)}", planned, farthest, REAL_RANKS_WITHIN))
            return rows
        finally:
            server.close()


def memory_row(what: str, planned: float, held: float, within: float) -> Row:
    return row(f"peak memory, {what}", planned / 2**30, held / 2**30, "allocated", within, "GiB")


def row(figure: str, planned: float, real: float, real_name: str, within: float, unit: str = "") -> Row:
    """The ratio is the error, without its sign."""
    error = planned / real - 1
    return Row(
        figure,
        planned,
        real,
        abs(error),
        within,
        None,
        unit,
        baseline_name=real_name,
        at_most=True,
        note=f"{error:+.1%}",
    )


def main() -> int:
    return run_bench(measure)


if __name__ == "__main__":
    # Ranks look their work up by its module, which has no such name while it is run as a program.
    from tests.bench import bench_planner

    sys.exit(bench_planner.main())
