"""What a lab's node has come to: files, sysctls, and what the stand-ins for systemd, Lustre, GPUs and disks remember."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rehearsal.lab.node import Node

Files = Mapping[str, tuple[int, bytes]]

_OF_ONE_NODE = ("pid", "uuid", "loaded")
"""Of what stand-ins remember. `loaded`: systemd's units as it has read them, which it does when it is first asked for one."""


def files(node: Node, *folders: str) -> Files:
    """Mode, and content or a link's target, of all that is in the folders, by path."""
    root = Path(f"/proc/{node.pid}/root")
    found = {}
    for path in (path for folder in folders for path in Path(f"{root}{folder}").rglob("*")):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[f"/{path.relative_to(root)}"] = (path.lstat().st_mode, content)
    return found


def sysctls(node: Node, *keys: str) -> dict[str, str]:
    root = Path(f"/proc/{node.pid}/root/proc/sys")
    paths = {key: root / key.replace(".", "/") for key in keys}
    return {key: path.read_text().strip() for key, path in paths.items() if path.exists()}


def simulated(node: Node) -> dict[str, Any]:
    """The stand-ins' state, less what no two nodes share."""
    root, names = Path(f"/proc/{node.pid}/root"), ("systemd", "lustre", "gpu", "chrony", "mounts", "disks")
    paths = {
        name: [root / folder / f"{name}.json" for folder in ("run/simulated", "var/lib/simulated")] for name in names
    }
    texts = {name: next((path.read_text() for path in both if path.exists()), "{}") for name, both in paths.items()}
    return {name: _common(json.loads(text)) for name, text in texts.items()}


def _common(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _common(value) for key, value in state.items() if key not in _OF_ONE_NODE}
    return state
