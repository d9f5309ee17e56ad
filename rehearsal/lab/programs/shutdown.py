"""Not systemd's shutdown: now, whatever time is given. `-r` restarts, anything else switches off."""

from __future__ import annotations

from collections.abc import Sequence

from .power import restart, switch_off


def main(arguments: Sequence[str]) -> int:
    if "-r" in arguments or "--reboot" in arguments:
        restart()
    else:
        switch_off()
    return 0
