"""An XFS over all instance-store disks, where the image has not made a file system already.

Only what is blank is ever formatted. Instance store comes back blank after a stop, so the boot unit makes it anew; after a
reboot it is as it was and is only mounted. mdadm and mkfs.xfs are called without --run, --force and -f: should a disk hold
something after all, they refuse. The file system is mounted by its label, whatever the kernel calls the disks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.disks.scheduler import instance_store
from node_setup.agent.kinds.files import owned_unit
from node_setup.agent.model import RUNTIME, Action, Facts, Remark, Request, Run, Setting, Step

IMAGE_SERVICE = "dlami-nvme.service"
"""AWS's deep-learning images gather the disks with this unit by LVM, at the same place."""
LABEL = "lustrain"
ARRAY = "/dev/md/lustrain"
MEMBER = "linux_raid_member"
SETTLED = Run(("udevadm", "settle"))
"""This waits until the names that udev makes are there: the array's, and that of the label, by which the unit mounts."""
FORMAT_SECONDS = 300.0
MOUNT_SECONDS = 120.0

Block = Mapping[str, Any]


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    """Plan the scratch file system at the mount point `Setting.options["path"]`."""
    return [line for setting in chosen if setting.id in selected for line in _plan_one(setting, facts)]


def mount_unit(path: str) -> str:
    """Return a unit outside of local-fs.target: after a stop there is no such label until the agent has made one, and nothing
    at boot may wait for that."""
    return f"""{owned.HEADER}[Unit]
Description=Scratch on the instance store
DefaultDependencies=no
Conflicts=umount.target
Before=umount.target

[Mount]
What=/dev/disk/by-label/{LABEL}
Where={path}
Type=xfs
Options=noatime,nofail

[Install]
WantedBy=multi-user.target
"""


def _plan_one(setting: Setting, facts: Facts) -> list[Step | Remark]:
    if facts.get("blocks") is None or facts.get("mounts") is None:
        return [Remark(setting.id, Status.UNKNOWN, "the disks and mounts of this node could not be read")]
    disks, path = instance_store(facts), str(setting.options["path"])
    if not disks:
        return [Remark(setting.id, Status.SKIPPED, "this node has no instance store")]
    mount = next((mount for mount in reversed(facts["mounts"]) if mount["target"] == path), None)
    others = _image_does_it(setting, facts, mount is not None)
    if others is not None:
        return [others]
    unit = owned.mount_unit(path)
    if unit not in facts["files"]:
        return [Remark(setting.id, Status.UNKNOWN, f"{unit} was not read")]
    if mount is not None and facts["files"][unit] is None:
        return [Remark(setting.id, Status.SKIPPED, f"{mount['source']} is mounted at {path}, not by us: left as it is")]
    if facts.get("init") != "systemd":
        why = f"{unit} needs systemd, and this node's init is {facts.get('init') or 'not known'}"
        return [Remark(setting.id, Status.SKIPPED if facts.get("init") else Status.UNKNOWN, why)]
    if mount is None:
        return _plan_mount(setting, path, disks, facts)
    return _persisted(setting, path, facts) or [
        Remark(setting.id, Status.OK, f"{mount['source']} is mounted at {path}")
    ]


def _image_does_it(setting: Setting, facts: Facts, mounted: bool) -> Remark | None:
    service: Mapping[str, Any] = (facts.get("services") or {}).get(IMAGE_SERVICE) or {}
    if service.get("load") != "loaded":
        return None
    if service["enabled"] in ("disabled", "masked") and service["active"] != "active":
        return None
    if service["active"] == "failed" and not mounted:
        return Remark(
            setting.id, Status.FAILED, f"the image's {IMAGE_SERVICE} failed; fix: journalctl -u {IMAGE_SERVICE}"
        )
    return Remark(setting.id, Status.SKIPPED, f"the image's {IMAGE_SERVICE} gathers and mounts the instance store")


def _plan_mount(setting: Setting, path: str, disks: Sequence[Block], facts: Facts) -> list[Step | Remark]:
    """Plan what is still to do, by how far an earlier run came: nothing done, array made, formatted."""
    unit = owned.mount_unit(path)
    planned = _make(disks, facts, ours=facts["files"][unit] is not None)
    if isinstance(planned, str):
        status = Status.UNKNOWN if any(disk["blank"] is None for disk in disks) else Status.CONFLICT
        return [Remark(setting.id, status, planned)]
    current, actions = planned
    start = Run(("systemctl", "start", owned_unit.name(unit)), MOUNT_SECONDS)
    wanted = f"xfs over {', '.join(disk['name'] for disk in disks)}"
    runtime = Step(setting.id, RUNTIME, path, current, wanted, (*actions, start))
    return [*_persisted(setting, path, facts), runtime]


def _make(disks: Sequence[Block], facts: Facts, ours: bool) -> tuple[str, tuple[Action, ...]] | str:
    """Return the current state and the actions up to the mount, or why nothing may be done."""
    array = _array_over(disks, facts) if len(disks) > 1 else None
    if array is None and all(_free(disk) for disk in disks):
        return "blank", _gathered([disk["path"] for disk in disks])
    if array is not None and _free(array):
        return "array, not formatted", _formatted(array["path"])
    top = array if len(disks) > 1 else disks[0]
    if ours and top is not None and top["fstype"] == "xfs" and not top["holders"] and not top["mountpoints"]:
        return "formatted, not mounted", ()
    if ours and array is None and all(disk["fstype"] == MEMBER and not disk["holders"] for disk in disks):
        assemble = Run(("mdadm", "--assemble", ARRAY, *(disk["path"] for disk in disks)))
        return "array, not assembled", (assemble, SETTLED)
    states = ", ".join(_state(block) for block in (*disks, *([array] if array else [])))
    return f"not formatted, since not every disk is blank: {states}; fix: wipefs the disks that may be erased"


def _free(block: Block) -> bool:
    """Check that nothing can be lost: the disk was read, and holds no signature, no partition, no user of any kind."""
    used = block.get("partitions") or block["holders"] or block["mountpoints"] or block["fstype"]
    return block["blank"] is True and not used


def _gathered(paths: Sequence[str]) -> tuple[Action, ...]:
    if len(paths) == 1:
        return _formatted(paths[0])
    create = (
        "mdadm",
        "--create",
        ARRAY,
        "--level=0",
        f"--raid-devices={len(paths)}",
        f"--name={LABEL}",
        "--homehost=any",
    )
    return (Run((*create, *paths)), SETTLED, *_formatted(ARRAY))


def _formatted(device: str) -> tuple[Action, ...]:
    """Format with -K: a new instance store needs no discard, which takes minutes on some disks."""
    return (Run(("mkfs.xfs", "-K", "-L", LABEL, device), FORMAT_SECONDS), SETTLED)


def _array_over(disks: Sequence[Block], facts: Facts) -> Block | None:
    """Return the RAID-0 that consists of exactly these disks."""
    names = {disk["name"] for disk in disks}
    arrays: Sequence[Block] = facts.get("arrays") or ()
    return next((array for array in arrays if array["level"] == "raid0" and set(array["members"]) == names), None)


def _state(block: Block) -> str:
    if block["blank"] is None:
        return f"{block['name']} could not be read"
    if _free(block):
        return f"{block['name']} is blank"
    uses = [*block.get("partitions", ()), *block["holders"], *block["mountpoints"]]
    return f"{block['name']} holds {block['fstype'] or 'data'}" + (f", used by {', '.join(uses)}" if uses else "")


def _persisted(setting: Setting, path: str, facts: Facts) -> list[Step | Remark]:
    """Plan the unit; no step where it is as it should be and enabled."""
    unit = owned.mount_unit(path)
    step = owned_unit.in_place(setting, {unit: mount_unit(path)}, unit, facts)
    return [] if step is None else [step]
