"""Persistence of the NVIDIA driver: its daemon, not `nvidia-smi -pm 1`, which NVIDIA means to take away
(https://docs.nvidia.com/deploy/driver-persistence/index.html)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.unit import ENABLED, no_systemd
from node_setup.agent.model import PERSISTED, RUNTIME, Facts, Remark, Request, Run, Setting, Step, Write

DAEMON = "nvidia-persistenced.service"
OTHER_OWNER = "parallelcluster_nvidia.service"
"""This is ParallelCluster's own unit for the same purpose (aws-parallelcluster-cookbook, nvidia_uvm.rb and CHANGELOG)."""


DROP_IN = f"""{owned.HEADER}[Service]
ExecStart=
ExecStart=/usr/bin/nvidia-persistenced --persistence-mode --verbose
"""
"""Ubuntu's package needs this: its unit starts the daemon with --no-persistence-mode, so that it runs and does nothing."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    return [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts)]


def owner(facts: Facts) -> str:
    """Return the unit that keeps the driver loaded on this node."""
    return OTHER_OWNER if _is_active(facts, OTHER_OWNER) else DAEMON


def without_gpu(setting: Setting, facts: Facts) -> Remark | None:
    """Return the remark on a GPU setting where there is no GPU, or where that is unknown; None where there are some to set."""
    gpu = facts.get("gpu") or {}
    if gpu.get("present") is None:
        return Remark(setting.id, Status.UNKNOWN, "whether this node has GPUs could not be read")
    if not gpu["present"]:
        return Remark(setting.id, Status.SKIPPED, "this node has no NVIDIA GPU")
    if not gpu["devices"]:
        return Remark(setting.id, Status.UNKNOWN, "there are GPUs, but nvidia-smi lists none; fix: see `nvidia-smi`")
    return None


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    remark = without_gpu(setting, facts) or _without_systemd(setting, facts)
    if remark is not None:
        return [remark]
    if _is_active(facts, OTHER_OWNER):
        return _under_other(setting, facts)
    service: Mapping[str, Any] = facts["services"].get(DAEMON) or {}
    if service.get("load") != "loaded":
        state = service.get("load") or "not installed"
        return [
            Remark(setting.id, Status.FAILED, f"{DAEMON} is {state}; fix: install it with the driver, or unmask it")
        ]
    planned: list[Step | Remark] = []
    if service["enabled"] not in ENABLED:
        enable = Run(("systemctl", "enable", DAEMON))
        planned.append(Step(setting.id, PERSISTED, DAEMON, service["enabled"] or "not enabled", "enabled", (enable,)))
    if service["active"] != "active":
        start = Run(("systemctl", "start", DAEMON))
        planned.append(Step(setting.id, RUNTIME, DAEMON, service["active"], "active", (start,)))
    else:
        planned += _running(setting, facts)
    return planned or [Remark(setting.id, Status.OK, f"{DAEMON} runs, and all GPUs persist", "Enabled", "Enabled")]


def _under_other(setting: Setting, facts: Facts) -> list[Step | Remark]:
    off = _without_persistence(facts)
    if off is None:
        return [
            Remark(setting.id, Status.UNKNOWN, f"{OTHER_OWNER} runs, but whether the GPUs persist could not be read")
        ]
    if off:
        why = f"{OTHER_OWNER} runs, but {off} without persistence; fix: journalctl -u {OTHER_OWNER}"
        return [Remark(setting.id, Status.FAILED, why, "Disabled", "Enabled")]
    return [Remark(setting.id, Status.OK, f"{OTHER_OWNER} runs, and all GPUs persist", "Enabled", "Enabled")]


def _running(setting: Setting, facts: Facts) -> list[Step | Remark]:
    """Plan what is left to do while the daemon runs: nothing, unless its options keep it from its work."""
    off = _without_persistence(facts)
    if off is None:
        return [Remark(setting.id, Status.UNKNOWN, f"{DAEMON} runs, but whether the GPUs persist could not be read")]
    if owned.PERSISTENCED not in facts["files"]:
        return [Remark(setting.id, Status.UNKNOWN, f"{owned.PERSISTENCED} was not read")] if off else []
    file = facts["files"][owned.PERSISTENCED]
    stale = file["content"] != DROP_IN if file is not None else bool(off)
    steps: list[Step | Remark] = []
    if stale:
        actions = (Write(owned.PERSISTENCED, DROP_IN), Run(("systemctl", "daemon-reload")))
        current = "missing" if file is None else "differs"
        steps.append(Step(setting.id, PERSISTED, owned.PERSISTENCED, current, "with --persistence-mode", actions))
    if off:
        restart = Run(("systemctl", "restart", DAEMON))
        steps.append(Step(setting.id, RUNTIME, "persistence mode", f"{off} without", "Enabled", (restart,)))
    return steps


def _without_systemd(setting: Setting, facts: Facts) -> Remark | None:
    missing = no_systemd(facts)
    return Remark(setting.id, *missing) if missing else None


def _without_persistence(facts: Facts) -> str | None:
    """Return, for a person, which GPUs do not persist; empty where all do, None where one could not be read."""
    states = {device["index"]: device["persistence"] for device in facts["gpu"]["devices"]}
    if any(state is None for state in states.values()):
        return None
    return ", ".join(f"gpu {index}" for index, state in states.items() if not state)


def _is_active(facts: Facts, unit: str) -> bool:
    return ((facts.get("services") or {}).get(unit) or {}).get("active") == "active"
