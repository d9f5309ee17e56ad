"""Power off and restart of a node: reboot(2), which in a PID namespace ends that namespace only."""

from __future__ import annotations

import os

from .state import refuse

_RESTART, _POWER_OFF = 0x01234567, 0x4321FEDC


def restart() -> None:
    _reboot(_RESTART)


def switch_off() -> None:
    _reboot(_POWER_OFF)


def _reboot(how: int) -> None:
    # In the first PID namespace the same call restarts the machine that runs the lab.
    if not _on_node():
        refuse("this machine is not a node of a lab; nothing was done")
    # Every call of systemctl loads this module, and next to none restarts anything.
    import ctypes

    ctypes.CDLL(None).reboot(how)


def _on_node() -> bool:
    with open("/proc/1/cmdline", "rb") as file:
        first = file.read()
    return first == b"tini\0-s\0--\0sleep\0infinity\0" and os.path.exists("/run/simulated/boot_id")
