"""Real text that every machine with Python has: the standard library's own sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

LEAST_BYTES = 2_000_000
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
"""Installed packages and folders that some distributions lack are left out: the text should be much the same everywhere."""


def standard_library_sources() -> list[Path]:
    """Return the sources in a fixed order; RuntimeError where Python was installed without them."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    size = sum(path.stat().st_size for path in sources)
    if size < LEAST_BYTES:
        raise RuntimeError(f"{root} holds only {size:,} bytes of Python sources; fix: install the full Python package")
    return sources
