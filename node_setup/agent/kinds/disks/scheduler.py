"""The I/O scheduler of instance-store disks; network volumes, with the root volume, keep the image's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.facts.devices.blocks import INSTANCE_STORE
from node_setup.agent.kinds.files.removal import plan_removal
from node_setup.agent.model import PERSISTED, RUNTIME, Facts, Put, Remark, Request, Setting, Step, Write


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan the scheduler `Setting.value`: now for each disk, and as a udev rule for disks to come."""
    planned = plan_removal(owned.UDEV, chosen, facts, request)
    return planned + [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts)]


def instance_store(facts: Facts) -> list[Mapping[str, Any]]:
    """Return the whole local NVMe disks in the order of their names, without the root's."""
    return [block for block in facts.get("blocks") or () if block["instance_store"] and not block["root"]]


def udev_rule(scheduler: str) -> str:
    return (
        f'{owned.HEADER}ACTION=="add|change", SUBSYSTEM=="block", KERNEL=="nvme[0-9]*n[0-9]*", ENV{{DEVTYPE}}=="disk", '
        f'ATTRS{{model}}=="{INSTANCE_STORE}*", ATTR{{queue/scheduler}}="{scheduler}"\n'
    )


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    if facts.get("blocks") is None:
        return [Remark(setting.id, Status.UNKNOWN, "the disks of this node could not be read")]
    disks = instance_store(facts)
    if not disks:
        return [
            Remark(setting.id, Status.SKIPPED, "this node has no instance store, and other disks are left as they are")
        ]
    planned = [
        line for line in (*(_disk(setting, disk) for disk in disks), _persisted(setting, facts)) if line is not None
    ]
    names = ", ".join(disk["name"] for disk in disks)
    return planned or [
        Remark(setting.id, Status.OK, f"on {names}, and on disks added later", setting.value, setting.value)
    ]


def _disk(setting: Setting, disk: Mapping[str, Any]) -> Step | Remark | None:
    """Plan one disk; None where it has the scheduler."""
    current, offered, wanted = disk["scheduler"], disk["schedulers"], setting.value
    file = f"/sys/block/{disk['name']}/queue/scheduler"
    if current is None:
        return Remark(setting.id, Status.UNKNOWN, f"{file} could not be read", wanted=wanted)
    if current == wanted:
        return None
    if wanted not in offered:
        return Remark(setting.id, Status.SKIPPED, f"{disk['name']} offers {', '.join(offered)} only", current, wanted)
    return Step(setting.id, RUNTIME, file, current, wanted, (Put(file, wanted),))


def _persisted(setting: Setting, facts: Facts) -> Step | Remark | None:
    """Plan the udev rule; None where it is in place."""
    if owned.UDEV not in facts["files"]:
        return Remark(setting.id, Status.UNKNOWN, f"{owned.UDEV} was not read")
    file, content = facts["files"][owned.UDEV], udev_rule(setting.value)
    if file is not None and file["content"] == content:
        return None
    current = "missing" if file is None else "differs"
    return Step(setting.id, PERSISTED, owned.UDEV, current, setting.value, (Write(owned.UDEV, content),))
