"""Not a Lustre client: shows a folder that all nodes of the lab share, whatever file system is named.

What is left out is all that a network does: servers that are away, evictions, time-outs, quotas, a mount that hangs. The
name must have the form of one of FSx (`dns@tcp:/name`), and `/unreachable` as its name is refused as a wrong one would be.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import lnetctl, modprobe, mounts
from .state import change, hardware, refuse

_SOURCE = re.compile(r"[\w.-]+@(tcp|efa)\d*(:[\w.-]+@(tcp|efa)\d*)*:/(?P<name>\w+)(/[\w./-]*)?")
_SERVER = "198.51.100.8"
_OF_MOUNT = ("_netdev", "noauto", "nofail", "defaults", "auto", "user")


def main(arguments: Sequence[str]) -> int:
    words, options = [], ""
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        if one == "-o" and rest:
            options = rest.pop(0)
        elif not one.startswith("-"):
            words.append(one)
    attach(words[0], words[1], options)
    mounts.rewrite()
    return 0


def attach(source: str, target: str, options: str) -> None:
    match = _SOURCE.fullmatch(source)
    target = target.rstrip("/")
    if not hardware()["lustre"]:
        refuse(f"mount: {target}: unknown filesystem type 'lustre'.", 32)
    if not match:
        refuse(f"mount.lustre: can't parse source name '{source}': Invalid argument", 22)
    if not Path(target).is_dir():
        refuse(f"mount.lustre: {target} inaccessible: No such file or directory", 2)
    if match["name"] == "unreachable":
        refuse(
            f"mount.lustre: mount {source} at {target} failed: No such file or directory\nIs the MGS specification correct?",
            2,
        )
    modprobe.insert("lustre")
    subprocess.run(["/usr/bin/mount", "--bind", "/run/simulated/fsx", target], check=True)
    kept = [entry for entry in options.split(",") if entry and entry not in _OF_MOUNT and not entry.startswith("x-")]
    mode = ["ro"] if "ro" in kept else ["rw"]
    shown = (
        mode
        + [item for item in kept if item not in ("rw", "ro")]
        + ["checksum", "nouser_xattr", "lruresize", "lazystatfs"]
    )
    lnetctl.mounted()
    with change("mounts") as state:
        # The real one hands the kernel the servers' addresses, and the kernel shows those.
        state[target] = {"source": f"{_SERVER}@tcp:/{match['name']}", "type": "lustre", "options": ",".join(shown)}
