"""Not mkfs.xfs: writes the four bytes by which XFS is known, and remembers label and UUID. Nothing can be stored in it;
`mount` shows a folder instead."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .disks import make_file_system, signature
from .state import refuse


def main(arguments: Sequence[str]) -> int:
    rest, label, force, device = list(arguments), "", False, ""
    while rest:
        one = rest.pop(0)
        if one == "-L" and rest:
            label = rest.pop(0)
        elif one == "-f":
            force = True
        elif not one.startswith("-"):
            device = one
    if not os.path.exists(device):
        refuse(f"Error accessing specified device {device}: No such file or directory")
    content = signature(device)
    if content and not force:
        why = f"mkfs.xfs: {device} appears to contain an existing filesystem ({content})."
        refuse(f"{why}\nmkfs.xfs: Use the -f option to force overwrite.")
    make_file_system(device, "xfs", label)
    return 0
