"""What every bench shares: interleaved repetitions, medians, the memcpy floor, the machine, and one row per figure.

A bench is a module with `measure(repetitions: int = 5) -> list[dict[str, Any]]` (rows as dictionaries) and a
`main()` that calls `run_bench(measure)`; run it as `python -m tests.bench.bench_NAME [--json] [--repetitions N]`.
Only ratios taken within one run on one machine are compared with a bar; absolute figures are shown for the reader.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

SLICE_BYTES = 16 << 20


@dataclass(frozen=True)
class Row:
    """One figure: ours against a baseline of the same run, the bar that the ratio must reach, and the physical limit.

    `ratio` is written so that more is better unless `at_most` is set (then `bar` is the largest ratio that passes).
    """

    figure: str
    ours: float
    baseline: float
    ratio: float
    bar: float
    limit: float | None
    unit: str
    baseline_name: str = ""
    limit_name: str = ""
    at_most: bool = False
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def timed(action: Callable[[], object]) -> float:
    """Seconds of wall clock that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleaved(cases: Mapping[str, Callable[[], float]], repetitions: int = 5) -> dict[str, list[float]]:
    """The values that each case returns, over `repetitions` rounds; every round runs all cases, starting with another one.

    Noise of a shared machine then falls on all cases alike. Progress goes to stderr, one line per round.
    """
    names = list(cases)
    values: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repetitions):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(cases[name]())
        shown = ", ".join(f"{name} {values[name][-1]:.4g}" for name in names)
        print(f"round {round_ + 1}/{repetitions}: {shown}", file=sys.stderr, flush=True)
    return values


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def memcpy_seconds(size: int, threads: int = 2) -> float:
    """Seconds to copy `size` bytes between two touched buffers with `threads` threads: the floor under every save or upload."""
    source, target = _buffers(size)
    cut = [(i * size // threads, (i + 1) * size // threads) for i in range(threads)]

    def copy(span: tuple[int, int]) -> None:
        # numpy releases the GIL for copies of this size; slices keep the threads' streams apart.
        for start in range(span[0], span[1], SLICE_BYTES):
            end = min(start + SLICE_BYTES, span[1])
            np.copyto(target[start:end], source[start:end])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, cut))
        return timed(lambda: list(pool.map(copy, cut)))


_kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}


def _buffers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """One touched pair of buffers, kept between calls so that page faults are not measured."""
    if size not in _kept:
        _kept.clear()
        _kept[size] = (np.ones(size, np.uint8), np.zeros(size, np.uint8))
    return _kept[size]


def machine() -> dict[str, str]:
    """Which machine and when, for the head of a table of results."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| figure | ours | baseline | ratio | bar | limit | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        sign = "<=" if row.get("at_most") else ">="
        limit = "" if row["limit"] is None else f"{row['limit']:.4g} {row['unit']} {row.get('limit_name', '')}".strip()
        baseline = f"{row['baseline']:.4g} {row['unit']} {row.get('baseline_name', '')}".strip()
        verdict = "holds" if row["holds"] else "falls short"
        if row.get("note"):
            verdict += f": {row['note']}"
        cells = [
            row["figure"],
            f"{row['ours']:.4g} {row['unit']}",
            baseline,
            f"{row['ratio']:.2f}",
            f"{sign} {row['bar']:g}",
            limit,
            verdict,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_bench(measure: Callable[[int], list[dict[str, Any]]]) -> int:
    """The command line of a bench; exit code 1 when a figure falls short of its bar."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="print machine and rows as one JSON object")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    rows = measure(args.repetitions)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
        print(table(rows))
    return 0 if all(row["holds"] for row in rows) else 1
