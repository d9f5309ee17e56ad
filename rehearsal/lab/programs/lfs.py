"""Not Lustre's lfs: keeps a directory's layout as an attribute of the folder that stands for the file system.

It prints layouts as lfs 2.15 does; nothing is striped, and files have no layout. Left out: pools, DoM, mirrors, migrate,
quotas, changelogs. The attribute goes with the folder, so every node of the lab sees it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .lctl import MDTS, OSTS, mounted
from .state import peek, refuse

_ATTRIBUTE = "trusted.simulated_layout"
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_GIB = 2**30
_STRIPE = 2**20
# What FSx gives its file systems since 2023-08 (FSx for Lustre user guide, "Striping data").
_DEFAULT = [
    {"end": 100 * 2**20, "count": 1, "size": _STRIPE},
    {"end": 10 * _GIB, "count": 8, "size": _STRIPE},
    {"end": 100 * _GIB, "count": 16, "size": _STRIPE},
    {"end": -1, "count": 32, "size": _STRIPE},
]


def main(arguments: Sequence[str]) -> int:
    verbs = {"setstripe": _setstripe, "getstripe": _getstripe, "df": _df}
    if arguments[:1] == ["--version"]:
        print("lfs 2.15.6")
        return 0
    if not arguments or arguments[0] not in verbs:
        refuse(f"lfs: this stand-in knows {', '.join(verbs)}, not {' '.join(arguments[:1])!r}")
    return verbs[arguments[0]](list(arguments[1:]))


def _on_lustre(path: str) -> str:
    real = os.path.realpath(path)
    targets = [target for target, entry in peek("mounts").items() if entry["type"] == "lustre"]
    if not any(real == target or real.startswith(f"{target}/") for target in targets):
        refuse(f"lfs: {path} is not on a Lustre filesystem: Inappropriate ioctl for device (25)", 25)
    return real


def _setstripe(arguments: list[str]) -> int:
    components: list[dict[str, int]] = []
    current: dict[str, int] = {}
    rest, path = arguments, ""
    while rest:
        flag, rest = rest[0], rest[1:]
        if not flag.startswith("-"):
            path = flag
            continue
        value, rest = (rest[0], rest[1:]) if rest else ("", [])
        if flag in ("-E", "--component-end"):
            current = {"end": -1 if value in ("-1", "eof", "EOF") else _size(value)}
            components.append(current)
        elif flag in ("-c", "--stripe-count"):
            current["count"] = int(value)
        elif flag in ("-S", "--stripe-size"):
            current["size"] = _size(value)
        elif flag in ("-i", "--stripe-index"):
            current["offset"] = int(value)
        else:
            refuse(f"lfs setstripe: unrecognized option '{flag}'")
    real = _on_lustre(path)
    if not os.path.isdir(real):
        refuse(f"lfs setstripe: cannot create composite file '{path}': File exists", 17)
    components = components or [{**current, "end": -1}]
    if any(component.get("size", _STRIPE) % 65536 for component in components):
        refuse("lfs setstripe: invalid stripe size: must be a multiple of 64KiB: Invalid argument", 22)
    os.setxattr(real, _ATTRIBUTE, json.dumps(components).encode())
    return 0


def _size(text: str) -> int:
    unit = _UNITS.get(text[-1:].lower(), 0)
    return int(text[:-1]) * unit if unit else int(text)


def _layout(path: str) -> list[dict[str, Any]]:
    """Return the folder's own, else that of the nearest above it: a directory inherits when it is made."""
    top = next(target for target in peek("mounts") if path == target or path.startswith(f"{target}/"))
    while True:
        try:
            layout: list[dict[str, Any]] = json.loads(os.getxattr(path, _ATTRIBUTE))
        except OSError:
            if path == top:
                return _DEFAULT
            path = os.path.dirname(path)
        else:
            return layout


def _getstripe(arguments: list[str]) -> int:
    for path in (argument for argument in arguments if not argument.startswith("-")):
        real = _on_lustre(path)
        if not os.path.exists(real):
            print(f"lfs getstripe: error: getstripe failed for {path}: No such file or directory", file=sys.stderr)
            return 2
        layout = _layout(real)
        if "-d" not in arguments:
            print(path)
        print(_plain(layout[0]) if len(layout) == 1 else _composite(layout))
    return 0


def _plain(one: dict[str, int], tab: str = " ") -> str:
    count, size = one.get("count", 1), one.get("size") or _STRIPE
    offset = one.get("offset", -1)
    return f"stripe_count:  {count}{tab}stripe_size:   {size}{tab}pattern:       raid0{tab}stripe_offset: {offset}"


def _composite(layout: list[dict[str, int]]) -> str:
    lines = [f"  lcm_layout_gen:    0\n  lcm_mirror_count:  1\n  lcm_entry_count:   {len(layout)}"]
    start = 0
    for item in layout:
        end = "EOF" if item["end"] == -1 else str(item["end"])
        ids = "    lcme_id:             N/A\n    lcme_mirror_id:      N/A\n    lcme_flags:          0\n"
        extent = f"    lcme_extent.e_start: {start}\n    lcme_extent.e_end:   {end}\n"
        lines.append(f"{ids}{extent}      {_plain(item, '       ')}\n")
        start = item["end"]
    return "\n".join(lines)


def _df(arguments: list[str]) -> int:
    path = next((argument for argument in arguments if not argument.startswith("-")), "")
    _on_lustre(path)
    target = next(item for item in peek("mounts") if path == item or path.startswith(f"{item}/"))
    name = mounted()
    print("UUID                   1K-blocks        Used   Available Use% Mounted on")
    for kind, count, size in (("MDT", MDTS, 34_000_000), ("OST", OSTS, 1_170_000_000)):
        for number in range(count):
            used = size // 20
            row = f"{name}-{kind}{number:04x}_UUID {size:>14} {used:>11} {size - used:>11}"
            print(f"{row}   5% {target}[{kind}:{number}]")
    total = OSTS * 1_170_000_000
    print(f"\nfilesystem_summary: {total:>13} {total // 20:>11} {total - total // 20:>11}   5% {target}\n")
    return 0
