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
