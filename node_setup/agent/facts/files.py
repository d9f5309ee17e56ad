"""Content and mode of the agent's own files."""

from __future__ import annotations

import os
import stat
from typing import Any

from node_setup.agent import owned
from node_setup.agent.facts.scene import Scene

EMPTY: dict[str, Any] = {"files": {}}


def collect(scene: Scene) -> dict[str, Any]:
    return {"files": {path: _file(scene, path) for path in (*owned.PATHS, *owned.NOTES, *scene.wanted.mount_units)}}


def _file(scene: Scene, path: str) -> dict[str, str] | None:
    """Read one file; None where there is no such file. A file that may not be read is an error, and has no content."""
    try:
        mode = os.lstat(scene.host.path(path)).st_mode
    except OSError:
        return None
    content = scene.host.read(path)
    if content is None or not stat.S_ISREG(mode):
        scene.fault("files", f"{path} is not a file that can be read")
    return {"content": content or "", "mode": f"{stat.S_IMODE(mode):04o}"}
