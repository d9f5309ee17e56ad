"""`pulumi preview` of a new cluster under the real engine, from 1 to 1,000 nodes and from 1 to 50 groups.

Most of it is the start of engine, provider and interpreter; the embedded AWS answers the few look-ups.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from infra.local.aws import LocalAws
from infra.local.engine import Engine, engine_missing
from tests.bench.harness import Row, interleaved, median, run_bench, timed

NODES, GROUPS = 1000, 50
FLAT = 1.5
"""A plan is made of groups: nodes cost nothing in it."""


def measure(repetitions: int = 5) -> list[dict[str, Any]]:
    if missing := engine_missing():
        sys.exit(f"bench_preview needs the engine: {missing}")
    sizes = {"one": (1, 1), "nodes": (NODES, 1), "groups": (GROUPS, GROUPS)}
    with tempfile.TemporaryDirectory(prefix="lustrain-bench-preview-") as folder, LocalAws() as aws:
        engines = {}
        for name, (nodes, groups) in sizes.items():
            engine = Engine(Path(folder) / name, "rehearsal", aws.environment)
            engine.change({**engine.spec, "groups": workers(nodes, groups)})
            engines[name] = engine
        resources = {name: len(engine.steps()) for name, engine in engines.items()}
        cases = {name: (lambda engine=engine: timed(lambda: engine("preview"))) for name, engine in engines.items()}
        took = {name: median(values) for name, values in interleaved(cases, repetitions).items()}
    rows = [
        _row(f"preview of {NODES} nodes in one group", took["nodes"], took["one"], FLAT, resources["nodes"]),
        _row(f"preview of {GROUPS} groups", took["groups"], took["one"], GROUPS, resources["groups"]),
    ]
    return [row.as_dict() for row in rows]


def workers(nodes: int, groups: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"train-{number}",
            "instance_type": "g6e.8xlarge",
            "count": nodes // groups,
            "capacity": {"mode": "spot"},
        }
        for number in range(groups)
    ]


def _row(figure: str, ours: float, baseline: float, bar: float, resources: int) -> Row:
    return Row(
        figure=figure,
        ours=ours,
        baseline=baseline,
        ratio=ours / baseline,
        bar=bar,
        limit=None,
        unit="s",
        baseline_name="1 node in 1 group",
        at_most=True,
        note=f"{resources} resources",
    )


if __name__ == "__main__":
    sys.exit(run_bench(measure))
