"""What holds for both machines beside the nodes, Slurm's controller and the monitor; the rules stand in their families."""

from __future__ import annotations

from infra.config import ClusterSpec, Group
from infra.finding import Problems, finding
from infra.plan.nodes.auto_scaling import CANONICAL
from infra.plan.nodes.machine import PATHS


def has_no_image(spec: ClusterSpec, machine: Group | None) -> Problems:
    kind = spec.node_of(machine) if machine else None
    if machine and kind and kind.architecture not in CANONICAL:
        fix = "take a type like m7i.large or m7g.large"
        yield finding(f"{PATHS[machine.name]}.type", f"{kind.name} is {kind.architecture}", fix)


def has_idle_accelerators(spec: ClusterSpec, machine: Group | None) -> Problems:
    kind = spec.node_of(machine) if machine else None
    if machine and kind and kind.accelerators:
        message = f"{kind.name} has accelerators, which no job can use on the {machine.name}"
        yield finding(f"{PATHS[machine.name]}.type", message, "take a type like m7i.large")
