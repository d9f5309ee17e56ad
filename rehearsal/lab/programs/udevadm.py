"""Not udev: applies `ATTR{…}="…"` of /etc/udev/rules.d to the simulated block devices, at boot and on `trigger`.

Rules may match by KERNEL, SUBSYSTEM, ACTION, ENV{DEVTYPE}, and by ATTR{…} or ATTRS{…}; any other key makes a rule not match.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from .state import refuse

_PART = re.compile(r'\s*([A-Z]+)(?:\{([^}]*)\})?\s*(==|!=|=|\+=)\s*"([^"]*)"\s*,?')


def main(arguments: Sequence[str]) -> int:
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    if verb == "trigger":
        apply_rules()
    elif verb not in ("control", "settle"):
        refuse(f"udevadm: this stand-in knows trigger, control and settle, not {verb!r}")
    return 0


def apply_rules() -> None:
    for file in sorted(Path("/etc/udev/rules.d").glob("*.rules")):
        for line in file.read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                parts = _PART.findall(line)
                for device in sorted(Path("/sys/block").glob("*")):
                    if all(_holds(device, part) for part in parts):
                        _assign(device, parts)


def _holds(device: Path, part: tuple[str, str, str, str]) -> bool:
    key, attribute, operator, value = part
    if operator not in ("==", "!="):
        return True
    actual = {"KERNEL": device.name, "SUBSYSTEM": "block", "ACTION": "add"}.get(key, "")
    if (key, attribute) == ("ENV", "DEVTYPE"):
        actual = "disk"
    if key in ("ATTR", "ATTRS"):
        # ATTRS looks at the devices above as well, of which there is one.
        inner = device / "device" / attribute
        path = inner if key == "ATTRS" and inner.exists() else device / attribute
        actual = path.read_text().strip() if path.exists() else ""
    return any(fnmatch.fnmatchcase(actual, item) for item in value.split("|")) == (operator == "==")


def _assign(device: Path, parts: list[tuple[str, str, str, str]]) -> None:
    for key, attribute, operator, value in parts:
        if key == "ATTR" and operator == "=" and (device / attribute).exists():
            choose(device / attribute, value)


def choose(path: Path, value: str) -> None:
    """Write a choice as the kernel shows it afterwards: all options, the chosen one in brackets."""
    choices = path.read_text().replace("[", "").replace("]", "").split()
    if len(choices) > 1 and value in choices:
        value = " ".join(f"[{choice}]" if choice == value else choice for choice in choices)
    path.write_text(f"{value}\n")
