"""Not the kernel's /proc/mounts: a file over it that says `lustre` of the shared folder and calls the disk a disk.

The kernel of the machine has no Lustre and no NVMe, so a mounted file system of a node is a bind mount or a folder. The file
is written anew whenever the node's `mount` or `umount` ran; /proc/self/mounts and mountinfo stay the kernel's own, so
findmnt and the like tell the truth about the lab.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from .state import VOLATILE, hardware, peek

_FILE = VOLATILE / "mounts"
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _AT_FDCWD = 1, 4, -100


def cover() -> None:
    """Put the file over /proc/mounts, which is a link into each process' folder: mount(8) would follow it."""
    rewrite()
    libc = ctypes.CDLL(None, use_errno=True)
    tree = libc.syscall(_OPEN_TREE, _AT_FDCWD, str(_FILE).encode(), _OPEN_TREE_CLONE)
    if tree < 0 or libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, b"/proc/mounts", _MOVE_MOUNT_F_EMPTY_PATH):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "/proc/mounts")
    os.close(tree)


def rewrite() -> None:
    """Rewrite in place: the file is mounted, and another one of its name would not be."""
    simulated = peek("mounts")
    lines = [_shown(line, simulated) for line in Path("/proc/self/mounts").read_text().splitlines()]
    _FILE.write_text("".join(f"{line}\n" for line in lines if line))


def _shown(line: str, simulated: dict[str, dict[str, str]]) -> str | None:
    _, target, _, options, *_ = line.split(" ")
    entry = simulated.get(target)
    if entry:
        return f"{entry['source']} {target} {entry['type']} {entry['options']} 0 0"
    if target == "/" and hardware()["type"]:
        mode = options.split(",", 1)[0]
        return f"/dev/nvme0n1p1 / ext4 {mode},relatime,discard,errors=remount-ro 0 0"
    if target.startswith(("/run/simulated", "/opt/simulated", "/proc/sys/", "/dev/nvme")):
        return None
    return line
