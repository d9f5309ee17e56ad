"""Not mount(8) but around it: `-t lustre` and simulated disks become bind mounts, and the simulated /proc/mounts follows.

All else goes to the real program. Left out: fstab entries of simulated file systems, remounting one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import mount_lustre, mounts
from .disks import file_systems
from .state import LASTING, change, refuse

_REAL = "/usr/bin/mount"
_WITH_VALUE = ("-t", "--types", "-o", "--options")


def main(arguments: Sequence[str]) -> int:
    words, options = _split(arguments)
    kind = options.get("-t") or options.get("--types") or ""
    if len(words) == 2 and kind == "lustre":
        mount_lustre.attach(words[0], words[1], options.get("-o", options.get("--options", "")))
    elif len(words) == 2 and _device(words[0]) in file_systems():
        _attach_disk(_device(words[0]), words[1], options.get("-o", ""))
    else:
        status = subprocess.run([_REAL, *arguments], check=False).returncode
        mounts.rewrite()
        return status
    mounts.rewrite()
    return 0


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    words: list[str] = []
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        if one in _WITH_VALUE and rest:
            options[one] = rest.pop(0)
        elif one.startswith("-"):
            options[one] = ""
        else:
            words.append(one)
    return words, options


def _device(source: str) -> str:
    """Return the disk that a path or a UUID= or LABEL= names."""
    tag, equals, value = source.partition("=")
    if equals:
        return next((path for path, one in file_systems().items() if one.get(tag.lower()) == value), source)
    return os.path.realpath(source)


def _attach_disk(device: str, target: str, options: str) -> None:
    if not Path(device).exists():
        refuse(f"mount: {target}: special device {device} does not exist.", 32)
    if not Path(target).is_dir():
        refuse(f"mount: {target}: mount point does not exist.", 32)
    disk = file_systems()[device]
    content = LASTING / "content" / disk["uuid"]
    content.mkdir(parents=True, exist_ok=True)
    subprocess.run([_REAL, "--bind", str(content), target], check=True)
    with change("mounts") as state:
        state[target] = {"source": device, "type": disk["type"], "options": f"rw,{options or 'relatime'}"}
