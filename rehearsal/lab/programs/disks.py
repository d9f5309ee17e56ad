"""Arrays and file systems on a node's simulated disks: what the kernel would show of them in /sys, /dev and on the disks.

Disks are files as large as the real ones and all hole. An array's content is in no member: it is a file of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .state import LASTING, change, peek

ARRAY = "md127"
_MD_MAGIC = (0xA92B4EFC).to_bytes(4, "little")
_MD_OFFSET = 4096


def make_array(link: str, level: str, members: Sequence[str]) -> None:
    for member in members:
        _stamp(member, _MD_OFFSET, _MD_MAGIC)
    with change("disks", LASTING) as disks:
        disks.setdefault("arrays", {})[link] = {"level": level, "members": list(members)}
    show_array(link)


def show_array(link: str) -> None:
    """Show an array as after `mdadm --create` or --assemble, and as udev does at boot."""
    array = peek("disks", LASTING)["arrays"][link]
    names = [os.path.basename(os.path.realpath(member)) for member in array["members"]]
    sectors = sum(int(Path(f"/sys/block/{name}/size").read_text()) for name in names)
    folder = Path("/sys/block", ARRAY)
    for inner in ("md", "slaves", "holders", "queue"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    (folder / "size").write_text(f"{sectors}\n")
    (folder / "md/level").write_text(f"{array['level']}\n")
    (folder / "queue/scheduler").write_text("none\n")
    for name in names:
        (folder / "slaves" / name).mkdir(exist_ok=True)
        Path(f"/sys/block/{name}/holders/{ARRAY}").mkdir(parents=True, exist_ok=True)
    device = Path("/dev", ARRAY)
    with open(device, "ab") as file:
        file.truncate(sectors * 512)
    Path(link).parent.mkdir(exist_ok=True)
    _link(link, str(device))


def make_file_system(device: str, kind: str, label: str) -> None:
    with change("disks", LASTING) as disks:
        entry = {"type": kind, "label": label, "uuid": Path("/proc/sys/kernel/random/uuid").read_text().strip()}
        disks.setdefault("file_systems", {})[os.path.realpath(device)] = entry
    show_file_system(os.path.realpath(device))


def show_file_system(device: str) -> None:
    entry = file_systems()[device]
    if entry["type"] == "xfs":
        _stamp(device, 0, b"XFSB")
    for folder, name in (("by-label", entry["label"]), ("by-uuid", entry["uuid"])):
        if name:
            Path("/dev/disk", folder).mkdir(parents=True, exist_ok=True)
            _link(f"/dev/disk/{folder}/{name}", device)


def show_all() -> None:
    """At boot."""
    for link in peek("disks", LASTING).get("arrays", {}):
        show_array(link)
    for device in file_systems():
        show_file_system(device)


def file_systems() -> dict[str, Any]:
    by_disk: dict[str, Any] = peek("disks", LASTING).get("file_systems", {})
    return by_disk


def signature(device: str) -> str | None:
    """Return what mdadm and mkfs would refuse to overwrite."""
    with open(device, "rb") as file:
        head = file.read(_MD_OFFSET + 4)
    if head.startswith(b"XFSB"):
        return "xfs"
    return "linux_raid_member" if head[_MD_OFFSET:] == _MD_MAGIC else None


def _stamp(device: str, offset: int, magic: bytes) -> None:
    with open(device, "r+b") as file:
        file.seek(offset)
        file.write(magic)


def _link(link: str, target: str) -> None:
    if os.path.lexists(link):
        os.unlink(link)
    os.symlink(target, link)
