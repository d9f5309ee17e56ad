"""Where a file system may be mounted on a node."""

from __future__ import annotations

SYSTEM_FOLDERS = frozenset(
    {
        "bin",
        "boot",
        "dev",
        "etc",
        "home",
        "lib",
        "lib32",
        "lib64",
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "var",
    }
)
OPEN_FOLDERS = frozenset({"mnt", "opt", "srv"})
"""A mount on or in the former hides what a node needs to run; in the latter, only one on the folder itself."""


def mount_problem(path: str) -> str:
    """Why nothing should be mounted at `path`; empty where it may."""
    parts = path.strip("/").split("/")
    if "." in parts or ".." in parts:
        return "goes through . or .."
    if parts[0] in SYSTEM_FOLDERS or (parts[0] in OPEN_FOLDERS and len(parts) == 1):
        return f"would hide or lie in /{parts[0]}, which belongs to the operating system"
    return ""
