"""Not umount(8) but around it: the simulated /proc/mounts follows, and a Lustre client without a mount loses its parameters."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from . import mounts
from .state import VOLATILE, change, peek


def main(arguments: Sequence[str]) -> int:
    status = subprocess.run(["/usr/bin/umount", *arguments], check=False).returncode
    if status == 0:
        targets = [argument.rstrip("/") for argument in arguments if not argument.startswith("-")]
        with change("mounts") as state:
            gone = [target for target, entry in state.items() if target in targets or entry["source"] in targets]
            for target in gone:
                del state[target]
        if not any(entry["type"] == "lustre" for entry in peek("mounts").values()):
            (VOLATILE / "lustre.json").unlink(missing_ok=True)
    mounts.rewrite()
    return status
