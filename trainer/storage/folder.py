"""A folder that holds objects: unfinished files, their removal after a killed writer, a lock, and durable names."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lustrain import files
from lustrain.backoff import JITTER
from lustrain.file_lock import try_lock
from lustrain.problem import problem
from trainer.storage import StorageError
from trainer.storage.keys import PRIVATE

STALE_SECONDS = 24 * 3600.0
"""Age at which an unfinished file of another machine is taken for abandoned."""
LOCK_SECONDS = 60.0
MOVE_TRIES = 16


class Folder:
    """A root folder and its private `.lustrain/`.

    An unfinished file is flock-ed by its writer: within one boot of a machine the lock tells whether the writer still lives.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private = root / PRIVATE
        self._swept = False

    @contextmanager
    def unfinished(self) -> Iterator[tuple[int, Path]]:
        """Yield an open, locked, empty file and its temporary name, which is removed afterwards in any case."""
        make_folders(self.private, self.root)
        fd, tmp = self._create()
        try:
            if not self._swept:
                self._swept = True
                _sweep(self.private, os.fstat(fd).st_mtime)
            yield fd, tmp
        finally:
            with suppress(FileNotFoundError):
                tmp.unlink()
            os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other processes on this folder; StorageError when one holds the lock for LOCK_SECONDS."""
        make_folders(self.private, self.root)
        fd = os.open(self.private / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            end = time.monotonic() + LOCK_SECONDS
            while not try_lock(fd):
                if time.monotonic() > end:
                    why = f"another process has held its lock for {LOCK_SECONDS:.0f} s"
                    fix = "look for a stopped process that uses this folder"
                    raise StorageError(problem("folder", str(self.root), why, fix=fix))
                time.sleep(0.001 + 0.019 * JITTER())
            yield
        finally:
            os.close(fd)

    def into_place(self, target: Path, move: Callable[[], None]) -> None:
        """Run `move`, which gives an unfinished file the name `target`, below folders that are made where missing."""
        for _ in range(MOVE_TRIES):
            make_folders(target.parent, self.root)
            # A concurrent delete may remove the emptied folder between the two steps.
            with suppress(FileNotFoundError):
                move()
                return sync_folder(target.parent)
        why = "is removed as soon as it is made"
        raise StorageError(
            problem("folder", str(target.parent), why, fix="check which other process deletes files there")
        )

    def remove_emptied(self, folder: Path) -> None:
        """Remove `folder` and those above it, up to the root, as long as they are empty."""
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _create(self) -> tuple[int, Path]:
        while True:
            tmp = self.private / f".tmp-{_boot()}-{secrets.token_hex(8)}"
            fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Another process may have swept the file in the moment before it was locked.
            if os.fstat(fd).st_nlink:
                return fd, tmp
            os.close(fd)


def make_folders(folder: Path, root: Path) -> None:
    """Make the missing folders from `root` down to `folder`; each new name is durable before anything is put below it."""
    missing = []
    while folder != root and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        with suppress(FileExistsError):
            new.mkdir()
        sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable; a folder that was removed in the meantime has no names to keep."""
    try:
        files.sync_folder(folder)
    except OSError as error:
        # Some network file systems make names durable at once and refuse to sync a folder.
        if error.errno not in (errno.ENOENT, errno.EINVAL):
            raise


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _sweep(private: Path, now: float) -> None:
    """Remove unfinished files whose writer is dead, or that are too old to have a live one."""
    for tmp in private.glob(".tmp-*"):
        try:
            fd = os.open(tmp, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            of_this_boot = tmp.name.startswith(f".tmp-{_boot()}-")
            if (of_this_boot and try_lock(fd)) or now - os.fstat(fd).st_mtime > STALE_SECONDS:
                tmp.unlink(missing_ok=True)
        finally:
            os.close(fd)
