"""Not systemd: what its units do at boot, one after the other, some before sshd and some beside it.

Left out: timers, generators, fstab, anything that runs side by side. sysctl.d is applied by the real `sysctl --system`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import disks, modprobe, mounts, udevadm, update_grub
from .state import Refusal
from .systemctl import start_unit
from .unit import FOLDERS, load

_TARGETS = ("sysinit", "local-fs", "basic", "remote-fs", "multi-user", "graphical", "default")


def main(arguments: Sequence[str]) -> int:
    """`arguments` start sshd, between what comes before the network's services and what multi-user.target wants."""
    _early()
    subprocess.run(list(arguments), stdin=subprocess.DEVNULL, check=True)
    if os.fork() == 0:
        for name in _in_order(_wanted()):
            _say(start_unit, name)
        Path("/run/simulated/booted").touch()
        os._exit(0)
    return 0


def _early() -> None:
    update_grub.apply()
    mounts.cover()
    disks.show_all()
    udevadm.apply_rules()
    for file in sorted(Path("/etc/modules-load.d").glob("*.conf")):
        for name in (line.strip() for line in file.read_text().splitlines()):
            if name and name[0] not in "#;":
                _say(modprobe.insert, name)
    # Keys that a node may not set (the machine's own) fail here, each with its line in the lab's log.
    subprocess.run(["/usr/sbin/sysctl", "--quiet", "--system"], stdin=subprocess.DEVNULL, check=False)


def _wanted() -> list[str]:
    wanted: dict[str, None] = {}
    for target in _TARGETS:
        for folder in FOLDERS:
            for suffix in ("wants", "requires"):
                names = sorted(link.name for link in Path(folder, f"{target}.target.{suffix}").glob("*"))
                wanted.update((name, None) for name in names if not name.endswith((".timer", ".socket")))
    return list(wanted)


def _in_order(names: list[str]) -> list[str]:
    """Order each unit after what its After= names and what names it in Before=, as far as that is wanted; a circle is cut where
    it is met."""
    done: dict[str, None] = {}
    earlier: dict[str, list[str]] = {}
    for name in names:
        for other in load(name).words("Unit.Before"):
            earlier.setdefault(other, []).append(name)

    def visit(name: str, path: frozenset[str]) -> None:
        if name in done or name in path:
            return
        unit = load(name)
        before = unit.words("Unit.After") + unit.words("Unit.Requires") + earlier.get(name, [])
        if name.endswith("mount"):
            # As systemd orders mounts of network file systems; here an automount mounts as soon as it starts.
            before += earlier.get("remote-fs-pre.target", [])
        for path_wanted in unit.words("Unit.RequiresMountsFor"):
            before.append(path_wanted.strip("/").replace("-", "\\x2d").replace("/", "-") + ".mount")
        for other in before:
            if other in names:
                visit(other, path | {name})
        done[name] = None

    for name in names:
        visit(name, frozenset())
    return list(done)


def _say(act: Callable[[str], object], name: str) -> None:
    try:
        act(name)
    except Refusal as refusal:
        print(f"boot: {refusal}", file=sys.stderr)
