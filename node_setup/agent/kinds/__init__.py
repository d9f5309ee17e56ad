"""The kinds of settings: each a module with a pure `plan(chosen, selected, facts, request)`, loaded when a setting has it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from node_setup.agent.model import Facts, Remark, Request, Setting, Step

KINDS = {
    "module-option": "kernel.module_option",
    "module-load": "kernel.module_load",
    "sysctl": "kernel.sysctl",
    "scheduler": "disks.scheduler",
    "limit": "limits.session",
    "slurmd-limit": "limits.slurmd",
    "file": "files.file",
    "hold": "hold",
    "kernel-argument": "kernel.argument",
    "unit": "unit",
    "clock": "clock",
    "scratch": "disks.scratch",
    "gpu-persistence": "gpu.persistence",
    "gpu-clocks": "gpu.clocks",
    "lnet-efa": "lustre.lnet_efa",
    "lustre-mount": "lustre.mount",
    "lustre-stripe": "lustre.stripe",
    "lustre-parameter": "lustre.parameter",
    "s3-mounts": "s3_mounts",
    "agent": "agent",
    "metrics-timer": "metrics_timer",
    "pending": "pending",
    "observe": "observe",
}
"""Modules by name stand in the order in which they are planned and applied: a module's options before it is loaded, Lustre's
network before its mount, that before its directories' stripes and its client's parameters."""


class Planner(Protocol):
    def __call__(
        self, chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request
    ) -> list[Step | Remark]: ...


def planner(kind: str) -> Planner:
    """Return a kind's `plan`: `chosen` are its settings that apply here, `selected` the ids that the caller wants planned."""
    module: Any = import_module(f"{__name__}.{KINDS[kind]}")
    return cast(Planner, module.plan)
