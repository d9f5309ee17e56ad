"""Content and mode of the agent's own files."""

from __future__ import annotations

import os
import stat
from typing import Any

from node_setup.agent import owned
from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"files": {}}


def collect(reading: MachineReading) -> dict[str, Any]:
    return {"files": {path: _file(reading, path) for path in (*owned.PATHS, *owned.NOTES, *reading.wanted.mount_units)}}


def _file(reading: MachineReading, path: str) -> dict[str, str] | None:
    """Read one file; None where there is no such file. A file that may not be read is an error, and has no content."""
    try:
        mode = os.lstat(reading.host.path(path)).st_mode
    except OSError:
        return None
    content = reading.host.read(path)
    if content is None or not stat.S_ISREG(mode):
        reading.fault("files", f"{path} is not a file that can be read")
    return {"content": content or "", "mode": f"{stat.S_IMODE(mode):04o}"}
