"""Disks: their kind, what is on them, and whether one is blank. Nothing here writes."""

from __future__ import annotations

import errno
import os
import re
import struct
from typing import Any

from node_setup.agent.facts.machine import bracketed_choice
from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"blocks": None, "arrays": None}
INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
"""This model distinguishes a local NVMe disk from an EBS volume ("Amazon Elastic Block Store")
(https://docs.aws.amazon.com/ebs/latest/userguide/nvme-ebs-volumes.html)."""
_SKIPPED = re.compile(r"(loop|ram|zram|sr|fd|nbd|dm-|md)\d")
_ENDS_BYTES = 2**20
"""Every signature that `blkid` knows lies within this much of either end."""

_SIGNATURES = (
    (0, b"XFSB", "xfs"),
    (0, b"LUKS\xba\xbe", "crypto_LUKS"),
    (0, b"hsqs", "squashfs"),
    (0x438, b"\x53\xef", "ext4"),
    (0x10040, b"_BHRfS_M", "btrfs"),
    (0x400, b"\x10\x20\xf5\xf2", "f2fs"),
    (4086, b"SWAPSPACE2", "swap"),
    (65526, b"SWAPSPACE2", "swap"),
    (0x218, b"LVM2 001", "LVM2_member"),
    (0, b"\xfc\x4e\x2b\xa9", "linux_raid_member"),
    (4096, b"\xfc\x4e\x2b\xa9", "linux_raid_member"),
    (512, b"EFI PART", "gpt"),
    (4096, b"EFI PART", "gpt"),
    (3, b"NTFS    ", "ntfs"),
    (32769, b"CD001", "iso9660"),
    (510, b"\x55\xaa", "dos"),
)
"""Each row is (offset, bytes, name) at the beginning of a disk, from the probing tables of util-linux (libblkid/src)."""

Places = dict[str, list[tuple[str, str]]]
"""Each device, by number or path, has a list of (mount point, file system)."""

_MD_MAGIC = struct.pack("<I", 0xA92B4EFC)


def collect(reading: MachineReading) -> dict[str, Any]:
    names = reading.host.names("/sys/block")
    places = _places(reading)
    disks = [_disk(reading, name, places) for name in names if not _SKIPPED.match(name) and _real(reading, name)]
    arrays = [_array(reading, name, places) for name in names if name.startswith("md") and _real(reading, name)]
    return {"blocks": disks, "arrays": arrays}


def _real(reading: MachineReading, name: str) -> bool:
    """Leave out empty drives, arrays that are not assembled, and paths that the multipath code hides."""
    return bool(reading.number(f"/sys/block/{name}/size")) and reading.text(f"/sys/block/{name}/hidden") != "1"


def _array(reading: MachineReading, name: str, places: Places) -> dict[str, Any]:
    """Describe an array of disks, and what lies on it, as for a disk."""
    level, members = reading.text(f"/sys/block/{name}/md/level"), reading.host.names(f"/sys/block/{name}/slaves")
    use = {key: value for key, value in _use(reading, name, places).items() if key != "partitions"}
    return {"name": name, "path": f"/dev/{name}", "level": level, "members": members, **use}


def _places(reading: MachineReading) -> Places:
    """Return (mount point, file system) by device, by its number `259:0` and its path; swap counts as mounted, as in lsblk."""
    places: Places = {}
    for mount in reading.mounts:
        places.setdefault(mount.source, []).append((mount.target, mount.fstype))
    for number, target, fstype in parse_mountinfo(reading.host.read("/proc/self/mountinfo") or ""):
        places.setdefault(number, []).append((target, fstype))
    for line in (reading.host.read("/proc/swaps") or "").splitlines()[1:]:
        places.setdefault(line.split()[0] if line.split() else "", []).append(("[SWAP]", "swap"))
    return places


def parse_mountinfo(text: str) -> list[tuple[str, str, str]]:
    """Return (device number, mount point, file system) of each line of /proc/PID/mountinfo (proc(5))."""
    lines = (line.split(" ") for line in text.splitlines())
    return [
        (line[2], line[4].replace("\\040", " "), line[line.index("-") + 1])
        for line in lines
        if "-" in line[5:] and line.index("-") + 1 < len(line)
    ]


def _mounted(reading: MachineReading, folder: str, name: str, places: Places) -> list[tuple[str, str]]:
    number = reading.text(f"{folder}/dev") or name
    return list(dict.fromkeys([*places.get(number, []), *places.get(f"/dev/{name}", [])]))


def _below(reading: MachineReading, folder: str, name: str, places: Places) -> list[tuple[str, str]]:
    """Return where a device is mounted, itself or an array or logical volume that is built on it."""
    targets = _mounted(reading, folder, name, places)
    for holder in reading.host.names(f"{folder}/holders"):
        mapped = reading.text(f"/sys/block/{holder}/dm/name")
        targets += places.get(f"/dev/mapper/{mapped}", []) if mapped else []
        targets += _below(reading, f"/sys/block/{holder}", holder, places)
    return list(dict.fromkeys(targets))


def _disk(reading: MachineReading, name: str, places: Places) -> dict[str, Any]:
    folder = f"/sys/block/{name}"
    model = reading.text(f"{folder}/device/model")
    schedulers = reading.host.read(f"{folder}/queue/scheduler") or ""
    use = _use(reading, name, places)
    return {
        "name": name,
        "path": f"/dev/{name}",
        "model": model,
        "bytes": _size(reading, name),
        "instance_store": model == INSTANCE_STORE,
        "scheduler": bracketed_choice(schedulers) or (schedulers.strip() or None),
        "schedulers": schedulers.replace("[", "").replace("]", "").split(),
        **use,
        "root": "/" in use["mountpoints"],
    }


def _size(reading: MachineReading, name: str) -> int:
    """Return the size in bytes; the kernel counts blocks of 512 bytes whatever a disk's own blocks are."""
    return (reading.number(f"/sys/block/{name}/size") or 0) * 512


def _use(reading: MachineReading, name: str, places: Places) -> dict[str, Any]:
    """Return who uses a disk, or what lies on it."""
    host, folder = reading.host, f"/sys/block/{name}"
    partitions = [entry for entry in host.names(folder) if host.exists(f"{folder}/{entry}/partition")]
    folders = [(folder, name), *((f"{folder}/{partition}", partition) for partition in partitions)]
    holders = sorted({holder for inner, _ in folders for holder in host.names(f"{inner}/holders")})
    mounted = [place for inner, part in folders for place in _below(reading, inner, part, places)]
    targets = list(dict.fromkeys(target for target, _ in mounted))
    used = bool(partitions or holders or targets)
    fstype, blank = (
        (_direct(reading, folder, name, places), False) if used else _contents(reading, name, _size(reading, name))
    )
    return {"fstype": fstype, "holders": holders, "partitions": partitions, "mountpoints": targets, "blank": blank}


def _direct(reading: MachineReading, folder: str, name: str, places: Places) -> str | None:
    mounted = _mounted(reading, folder, name, places)
    return mounted[0][1] if mounted else None


def _contents(reading: MachineReading, name: str, size: int) -> tuple[str | None, bool | None]:
    """Return what lies on an unused disk and whether it is blank: both None for a disk that cannot be read."""
    try:
        # Exclusive: a disk that another mount namespace or a hidden holder uses answers "busy" (open(2), O_EXCL on devices).
        descriptor = os.open(reading.host.path(f"/dev/{name}"), os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return None, False
        reading.fault(f"blocks.{name}", f"cannot tell whether it is blank: {error.strerror}")
        return None, None
    try:
        head = os.pread(descriptor, min(_ENDS_BYTES, size), 0)
        tail = os.pread(descriptor, min(_ENDS_BYTES, size), max(size - _ENDS_BYTES, 0))
    except OSError as error:
        reading.fault(f"blocks.{name}", f"cannot be read: {error.strerror}")
        return None, None
    finally:
        os.close(descriptor)
    if not head or not tail:
        return None, None
    return signature(head, tail), not head.strip(b"\0") and not tail.strip(b"\0")


def signature(head: bytes, tail: bytes) -> str | None:
    """Return the file system, partition table or membership that the ends of a disk show; None for an unknown signature."""
    for offset, magic, name in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic:
            return name
    if tail[-512:-504] == b"EFI PART":
        return "gpt"
    # Versions 0.90 and 1.0 of an array's superblock lie 64 KiB aligned, and 8 to 12 KiB, before the end.
    for back in range(4096, min(len(tail), 2**17) + 1, 4096):
        if tail[len(tail) - back :][:4] == _MD_MAGIC:
            return "linux_raid_member"
    return None
