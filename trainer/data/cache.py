"""Whole shards of a remote token set on this node's disk: bounded, shared by all processes of the node, verified.

Which shards are kept is decided once, from the index: a run reads windows in random order, each once per epoch, so
every shard is as likely to be needed next as any other and no replacement policy beats keeping a fixed part. What
does not fit is read from S3 by byte range whenever it is needed (`shards.py`), so the order of samples never depends
on the size of the cache.

The cache folder belongs to the node: `<cache>/<checksum of the set>/<shard>.tok`. A download goes to a locked `.part`
file and gets its name when its checksum is right, so a second process waits for the first and a killed one leaves
nothing that could be mistaken for a shard. Before a download the least recently opened files of other sets are
removed until `cache_bytes` hold. A process that has such a file mapped keeps reading it: POSIX removes the name at
once, and the bytes when the last map is gone.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

from awscrt.checksums import crc64nvme

from lustrain.file_lock import hold_lock
from lustrain.problem import UserError, problem
from trainer.data.index import Index, Shard
from trainer.storage import CorruptObjectError, ObjectStore

DOWNLOAD_TRIES = 2
"""One more try for bytes that arrived wrong; the store itself retries what did not arrive."""


def resident_shards(index: Index, cache_bytes: int) -> dict[str, int]:
    """How many leading shards of each split are kept on disk within `cache_bytes`; the smallest split first.

    It depends on nothing but its arguments, so all ranks of a node, and the training and evaluation sets in each,
    keep the same.
    """
    left = cache_bytes
    counts: dict[str, int] = {}
    for name, split in sorted(index.splits.items(), key=lambda item: (item[1].tokens, item[0])):
        counts[name] = 0
        for shard in split.shards:
            size = shard.tokens * index.numpy_dtype.itemsize
            if size > left:
                break
            left -= size
            counts[name] += 1
    return counts


class ShardCache:
    """The part of the cache folder that holds one token set."""

    def __init__(self, folder: Path, cache_bytes: int, set_checksum: str) -> None:
        self._folder = folder
        self._limit = cache_bytes
        self._mine = folder / set_checksum[:32]
        try:
            self._mine.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(_unusable(folder, error)) from error

    def fetch(self, store: ObjectStore, shard: Shard, itemsize: int) -> Path:
        """Return the path of the shard's ids on disk; download and verify them first if no process of this node has.

        Raises StorageError when the store does not deliver, CorruptObjectError when it delivers other bytes than the
        index promises, UserError when the disk cannot take them.
        """
        target = self._mine / shard.tokens_key
        size = shard.tokens * itemsize
        if _has(target, size):
            os.utime(target)
            return target
        name = target.with_name(target.name + ".part")
        try:
            with hold_lock(name) as part:
                try:
                    if not _has(target, size):
                        self._make_room(size)
                        _download(store, shard, part, size)
                        os.replace(name, target)
                finally:
                    name.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(_unusable(self._folder, error, size)) from error
        return target

    def _make_room(self, size: int) -> None:
        """Remove files of other sets, least recently opened first, until `size` more bytes fit."""
        with hold_lock(self._folder / "evict.lock"):
            files = {}
            for path in self._folder.glob("*/*.tok"):
                with suppress(FileNotFoundError):
                    files[path] = path.stat()
            used = sum(status.st_size for status in files.values())
            for path, status in sorted(files.items(), key=lambda file: (file[1].st_mtime_ns, file[0])):
                if used + size <= self._limit:
                    return
                if path.parent != self._mine:
                    path.unlink(missing_ok=True)
                    used -= status.st_size


def _download(store: ObjectStore, shard: Shard, part: int, size: int) -> None:
    checksum = 0
    for _ in range(DOWNLOAD_TRIES):
        os.ftruncate(part, 0)
        # Reserving the blocks turns a full disk into an error here instead of a SIGBUS at a store into the map.
        os.posix_fallocate(part, 0, size)
        with mmap.mmap(part, size) as mapped, memoryview(mapped) as view:
            store.read_into(shard.tokens_key, view)
            checksum = crc64nvme(view)
        if checksum == shard.crc64nvme:
            os.fsync(part)
            return
    why = f"arrives with checksum {checksum:016x}, the index says {shard.crc64nvme:016x}"
    name = f"{store.uri.rstrip('/')}/{shard.tokens_key}"
    raise CorruptObjectError(problem("shard", name, why, fix="restore the shard, or tokenize the input again"))


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _unusable(folder: Path, error: OSError, size: int = 0) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free space there, or lower the size of the cache"
        return problem("cache", str(folder), f"no space left for another {size:,} bytes", fix=fix)
    return problem("cache", str(folder), f"cannot be used: {error.strerror}", fix="choose another cache folder")
