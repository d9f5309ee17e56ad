"""Not systemd-run: a stand-in that writes a transient unit and starts it. Left out: --wait, --scope, timers, user managers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from .state import refuse
from .systemctl import start_unit
from .unit import TRANSIENT

_LASTING = ("/etc/systemd/system", "/usr/lib/systemd/system")


def main(arguments: Sequence[str]) -> int:
    name, values, command = "", [], list(arguments)
    while command and command[0].startswith("-"):
        option, _, value = command.pop(0).partition("=")
        if option == "--":
            break
        if option == "--unit":
            name = f"{value.removesuffix('.service')}.service"
        elif option == "--uid":
            values.append(f"User={value}")
        elif option == "--property":
            values.append(value)
        elif option != "--quiet":
            refuse(
                f"systemd-run: unrecognized option '{option}'. (This stand-in knows --unit, --uid, --property, --quiet.)"
            )
    if not name or not command:
        refuse("systemd-run: a unit's name and a command are needed. (This stand-in makes up no names.)")
    file = Path(TRANSIENT, name)
    if any(os.path.exists(f"{folder}/{name}") for folder in (*_LASTING, TRANSIENT)):
        refuse(f"Failed to start transient service unit: Unit {name} was already loaded or has a fragment file.")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["[Service]", *values, f"ExecStart={shlex.join(command)}", ""]))
    return 0 if start_unit(name) else 1
