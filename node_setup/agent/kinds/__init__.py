"""The kinds of settings: each a module with a pure `plan(chosen, selected, facts, request)`, loaded when a setting has it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from node_setup.agent.model import Facts, Remark, Request, Setting, Step

KINDS = {
    "module-option": "module_option",
    "module-load": "module_load",
    "sysctl": "sysctl",
    "scheduler": "scheduler",
    "limit": "limit",
    "slurmd-limit": "slurmd_limit",
    "file": "file",
    "hold": "hold",
    "kernel-argument": "kernel_argument",
    "unit": "unit",
    "clock": "clock",
    "scratch": "scratch",
    "gpu-persistence": "gpu_persistence",
    "gpu-clocks": "gpu_clocks",
    "lnet-efa": "lnet_efa",
    "lustre-mount": "lustre_mount",
    "lustre-stripe": "lustre_stripe",
    "lustre-parameter": "lustre_parameter",
    "agent": "agent",
    "owed": "owed",
    "observe": "observe",
}
"""Module by name, in the order in which they are planned and applied: a module's options before it is loaded, Lustre's network
before its mount, that before its directories' stripes and its client's parameters."""


class Planner(Protocol):
    def __call__(
        self, chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request
    ) -> list[Step | Remark]: ...


def planner(kind: str) -> Planner:
    """The `plan` of a kind: `chosen` are its settings that apply here, `selected` the ids that the caller wants planned."""
    module: Any = import_module(f"{__name__}.{KINDS[kind]}")
    return cast(Planner, module.plan)
