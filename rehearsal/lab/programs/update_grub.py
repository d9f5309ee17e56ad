"""Not update-grub: keeps the arguments that /etc/default/grub gives the kernel, which a node's boot then shows.

There is no boot loader and no kernel to take them: /proc/cmdline says them, and what follows from two of them is shown in
/sys/module.
"""

from __future__ import annotations

import glob
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .state import LASTING, VOLATILE

_KEPT = LASTING / "cmdline"
_CSTATE = "intel_idle.max_cstate"


def main(arguments: Sequence[str]) -> int:
    files = ["/etc/default/grub", *sorted(glob.glob("/etc/default/grub.d/*.cfg"))]
    script = "".join(f". '{file}'; " for file in files) + 'echo "$GRUB_CMDLINE_LINUX $GRUB_CMDLINE_LINUX_DEFAULT"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    LASTING.mkdir(parents=True, exist_ok=True)
    _KEPT.write_text(done.stdout)
    print("Generating grub configuration file ...\ndone")
    return 0


def apply() -> None:
    """Apply it at boot. The file is mounted at /proc/cmdline, so it is changed in place."""
    if not _KEPT.exists():
        return
    file = VOLATILE / "proc/cmdline"
    given = _KEPT.read_text().split()
    file.write_text(f"{file.read_text().strip()} {' '.join(given)}\n")
    for argument in given:
        name, _, value = argument.partition("=")
        if name == _CSTATE:
            parameters = Path("/sys/module/intel_idle/parameters")
            parameters.mkdir(parents=True, exist_ok=True)
            (parameters / "max_cstate").write_text(f"{value}\n")
