"""Not systemd's reboot: ends the node's PID namespace at once; its lab boots it again."""

from __future__ import annotations

from collections.abc import Sequence

from .power import restart


def main(arguments: Sequence[str]) -> int:
    restart()
    return 0
