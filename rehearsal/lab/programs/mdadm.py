"""Not mdadm: makes and assembles RAID-0 arrays that are files, and shows them in /sys/block. Nothing is striped."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .disks import make_array, show_array, signature
from .state import LASTING, peek, refuse


def main(arguments: Sequence[str]) -> int:
    options = {item.partition("=")[0]: item.partition("=")[2] for item in arguments if item.startswith("-")}
    words = [argument for argument in arguments if not argument.startswith("-")]
    if "--create" in options:
        return _create(words[0], options, words[1:])
    if "--assemble" not in options:
        refuse(f"mdadm: this stand-in knows --create and --assemble, not {' '.join(arguments)!r}")
    if words[0] not in peek("disks", LASTING).get("arrays", {}):
        refuse(f"mdadm: no arrays found in config file or automatically for {words[0]}")
    show_array(words[0])
    return 0


def _create(link: str, options: dict[str, str], members: list[str]) -> int:
    if options.get("--raid-devices") != str(len(members)):
        refuse("mdadm: You haven't given enough devices (real or missing) to create this array")
    for member in members:
        if not os.path.exists(member):
            refuse(f"mdadm: cannot open {member}: No such file or directory")
        content = signature(member)
        if content:
            # The real one asks, and ends without an answer.
            refuse(f"mdadm: {member} appears to contain {content}\nContinue creating array? \nmdadm: create aborted.")
    make_array(link, f"raid{options.get('--level', '0').removeprefix('raid')}", members)
    return 0
