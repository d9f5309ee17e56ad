"""The tables of `settings/*.toml`: from `settings.json` in the packed agent, from the files in a checkout."""

from __future__ import annotations

import json
import pkgutil
from functools import cache
from typing import Any

PACKED = "settings.json"
"""This file in the package `node_setup` holds {file's stem: its content}, as `node_setup.pack` writes it. Python 3.9 reads no
TOML."""


@cache
def tables() -> dict[str, Any]:
    """Return every file of settings by its stem (`kernel`, `variables`, `xid`); callers do not change what they get."""
    packed = _packed()
    if packed is not None:
        content: dict[str, Any] = json.loads(packed)
        return content
    return _from_files()


def _packed() -> bytes | None:
    try:
        return pkgutil.get_data("node_setup", PACKED)
    except OSError:
        return None


def _from_files() -> dict[str, Any]:
    from pathlib import Path

    import tomllib

    folder = Path(__file__).resolve().parents[2] / "settings"
    return {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}
