"""Application clocks of NVIDIA GPUs at the highest pair that each GPU states, now and by a unit at boot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.files import owned_unit
from node_setup.agent.kinds.files.removal import plan_removal
from node_setup.agent.kinds.gpu.persistence import owner, without_gpu
from node_setup.agent.kinds.unit import no_systemd
from node_setup.agent.model import RUNTIME, Facts, Remark, Request, Run, Setting, Step

Pair = tuple[int, int]
"""A pair is the memory and the graphics clock in MHz, in the order of `nvidia-smi -ac`."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    before, after = (
        Run(("systemctl", "disable", owned_unit.name(owned.CLOCKS_UNIT))),
        Run(("systemctl", "daemon-reload")),
    )
    planned = plan_removal(owned.CLOCKS_UNIT, chosen, facts, request, (before,), (after,))
    return planned + [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts)]


def clocks_unit(after: str) -> str:
    """Return a unit that sets each GPU's own highest clocks, so that it holds for whatever type this disk boots on, as in the
    EKS image (awslabs/amazon-eks-ami templates/al2023/runtime/gpu/set-nvidia-clocks). `after` is the unit that keeps the driver
    loaded: clocks are lost with it. systemd takes `$$` for `$`."""
    query = "nvidia-smi --query-gpu=index,clocks.max.memory,clocks.max.graphics --format=csv,noheader,nounits"
    each = 'while IFS=", " read -r index memory graphics; do nvidia-smi -i "$$index" -ac "$$memory,$$graphics"; done'
    return f"""{owned.HEADER}[Unit]
Description=Highest application clocks of the GPUs
Requires={after}
After={after}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c '{query} | {each}'

[Install]
WantedBy=multi-user.target
"""


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    remark = without_gpu(setting, facts)
    if remark is not None:
        return [remark]
    devices = facts["gpu"]["devices"]
    settable = [device for device in devices if _pair(device["max"]) and _pair(device["applications"])]
    if not settable:
        return [Remark(setting.id, Status.SKIPPED, "this driver has no application clocks to set on these GPUs")]
    persisted = _persisted(setting, facts)
    planned = [*_runtime(setting, settable), *([] if persisted is None else [persisted])]
    shown = "; ".join(sorted({_text(device["max"]) for device in settable}))
    why = f"{len(settable)} of {len(devices)} GPUs have application clocks, and they are at their highest"
    return planned or [Remark(setting.id, Status.OK, why, shown, shown)]


def _runtime(setting: Setting, devices: Sequence[Mapping[str, Any]]) -> list[Step | Remark]:
    planned: list[Step | Remark] = []
    for device in devices:
        current, wanted = _text(device["applications"]), _text(device["max"])
        if current != wanted:
            command = Run(("nvidia-smi", "-i", str(device["index"]), "-ac", wanted))
            planned.append(Step(setting.id, RUNTIME, f"gpu {device['index']}", current, wanted, (command,)))
    return planned


def _persisted(setting: Setting, facts: Facts) -> Step | Remark | None:
    """Plan the unit; None where it is as it should be and enabled."""
    missing = no_systemd(facts)
    if missing is not None:
        return Remark(setting.id, *missing)
    if owned.CLOCKS_UNIT not in facts["files"]:
        return Remark(setting.id, Status.UNKNOWN, f"{owned.CLOCKS_UNIT} was not read")
    return owned_unit.in_place(setting, {owned.CLOCKS_UNIT: clocks_unit(owner(facts))}, owned.CLOCKS_UNIT, facts)


def _pair(clocks: Mapping[str, Any] | None) -> Pair | None:
    """Return the clocks; None where the driver says [N/A]: it will not take them either."""
    if not clocks or not isinstance(clocks.get("memory"), int) or not isinstance(clocks.get("graphics"), int):
        return None
    return clocks["memory"], clocks["graphics"]


def _text(clocks: Mapping[str, Any]) -> str:
    return f"{clocks['memory']},{clocks['graphics']}"
