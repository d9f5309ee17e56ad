"""Content and mode of the agent's own files, and the units of buckets that a boot has mounted."""

from __future__ import annotations

import os
import re
import stat
from typing import Any

from node_setup.agent import owned
from node_setup.agent.facts.reading import MachineReading

EMPTY: dict[str, Any] = {"files": {}, "s3_units": {}}


def collect(reading: MachineReading) -> dict[str, Any]:
    paths = (*owned.PATHS, *owned.NOTES, *reading.wanted.mount_units)
    return {"files": {path: _file(reading, path) for path in paths}, "s3_units": _s3_units(reading)}


def _s3_units(reading: MachineReading) -> dict[str, str]:
    """Return the mount point of each bucket's unit, by the unit's name; `infra.plan.storage.s3_mounts` writes them."""
    found = {}
    for name in reading.host.names(owned.UNITS):
        if owned.S3_UNIT.fullmatch(name):
            point = re.search(r"^ExecStop=/bin/umount (\S+)$", reading.host.read(f"{owned.UNITS}/{name}") or "", re.M)
            if point:
                found[name] = point[1]
    return found


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
