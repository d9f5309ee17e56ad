"""The jobs that a change of the Cluster would end. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lustrain.problem import Problem, problem

BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING"})
"""In a state: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES"""


def lost_job_problems(states: Mapping[str, Any], kept: Collection[str], why: str) -> Iterator[Problem]:
    """Yield a line for each node that runs jobs and is not `kept`; `states` is what `slurm-state` answered.

    A node that is DOWN has lost its jobs already, also where one is still shown as completing.
    """
    for host, node in states["nodes"].items():
        words = set(re.findall(r"[A-Z_]+", node["state"] or ""))
        if host not in kept and words & BUSY and "DOWN" not in words:
            fix = f"scontrol update NodeName={host} State=DRAIN Reason=leaving, then let them end or scancel -w {host}"
            yield problem(f"Slurm's node {host}", node["state"], f"runs jobs, and {why}", fix=fix)


def requeued_job_problems(states: Mapping[str, Any], kept: Collection[str]) -> Iterator[Problem]:
    """Yield a line where a node leaves that a job which waits to start again may have had.

    Slurm 22.05 remembers the nodes of such a job: where one of them was taken out it was started, and stayed in COMPLETING.
    """
    leaving, numbers = sorted({*states["nodes"]} - {*kept}), states["requeued"]
    if leaving and numbers:
        why = f"wait to start again, and may have had nodes that would leave: {', '.join(leaving)}"
        fix = f"end them by fab stop RUN --now or scancel {' '.join(numbers)}; fab train --resume starts a run again afterwards"
        yield problem("Slurm's requeued jobs", " ".join(numbers), why, fix=fix)
