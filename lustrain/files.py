"""Files that are replaced whole. Standard library and Python 3.9 only: the node agent carries this file too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

UNFINISHED = ".lustrain"
"""Suffix of the hidden file that is being written; one that stays was left by a killed writer."""


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `content`: a reader sees the old file or the new one, also after a crash.

    OSError, then nothing is left behind; the folder must be there.
    """
    unfinished = path.parent / f".{path.name}.{os.urandom(4).hex()}{UNFINISHED}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(unfinished, path)
    except BaseException:
        # An interrupt may come after the replacement, when nothing is left to remove.
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` survive a crash. OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
