"""A local token set is checked against the checksums of its index once per node; what was found whole is remembered.

A shard that was found whole leaves a marker in the node's cache folder. Its name is a hash of the file's path, inode,
size, times of change and expected checksum, so a file that is written again, replaced or given another index is read
again. A bit that flips on the disk after that is the disk's and the file system's to find.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from awscrt.checksums import crc64nvme

from trainer.background import BackgroundThread
from trainer.data.cache import locked
from trainer.data.index import Shard
from trainer.errors import UserError, problem

log = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""Out of the page cache 4 MiB at a time were checked at 7 GB/s by one thread, 1 MiB at 4 GB/s and 16 MiB at 6 GB/s."""
WAIT_S = 60.0
"""How long a start waits for the check: some 100 GB from a disk that gives 2 GB/s. A larger set is trained on meanwhile."""
SHOWN_PROBLEMS = 8


class Verifier:
    """A background thread that checks the shards of one split; `raise_failure` tells what it found."""

    def __init__(self, root: Path, shards: Sequence[Shard], cache_dir: Path) -> None:
        self._root, self._shards = root, shards
        self._markers: Path | None = cache_dir / "verified"
        self._damaged: list[str] = []
        self._closing = threading.Event()
        self._thread = BackgroundThread(self._run, "shard-verify")
        self._thread.start()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all shards are checked; False when `timeout` seconds did not suffice. UserError names the damaged ones."""
        self._thread.join(timeout)
        self.raise_failure()
        return not self._thread.is_alive()

    def raise_failure(self) -> None:
        """UserError for the shards found damaged so far; raises what else ended the thread."""
        self._thread.check()
        if self._damaged:
            more = [f"… and {len(self._damaged) - SHOWN_PROBLEMS} more shards are damaged"]
            raise UserError(self._damaged[:SHOWN_PROBLEMS] + (more if len(self._damaged) > SHOWN_PROBLEMS else []))

    def close(self) -> None:
        """Stop after the bytes under way."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._markers is not None:
                self._markers.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._remember_nothing(error)
        # The ranks of a node begin at different shards, so that they check side by side and not the same one in turn.
        begin = os.getpid() * 7919 % max(1, len(self._shards))
        for number in (*range(begin, len(self._shards)), *range(begin)):
            if self._closing.is_set():
                return
            self._check(self._shards[number])
        self._damaged.sort()

    def _check(self, shard: Shard) -> None:
        path = self._root / shard.tokens_key
        if self._markers is not None:
            try:
                self._check_once(path, shard, self._markers / _marker_name(path, shard))
                return
            except OSError as error:
                self._remember_nothing(error)
        self._read(path, shard)

    def _check_once(self, path: Path, shard: Shard, marker: Path) -> None:
        """Read the file unless a process of this node has done so or is doing so; OSError where that cannot be noted."""
        unfinished = marker.with_suffix(".part")
        if marker.exists():
            return
        with locked(unfinished):
            try:
                if not marker.exists() and self._read(path, shard):
                    unfinished.replace(marker)
            finally:
                unfinished.unlink(missing_ok=True)

    def _remember_nothing(self, error: OSError) -> None:
        log.info("token shards are checked anew at every start, the cache folder cannot be used: %s", error)
        self._markers = None

    def _read(self, path: Path, shard: Shard) -> bool:
        """Whether the file was read to its end and is whole; damage is noted."""
        found = 0
        buffer = memoryview(bytearray(READ_BYTES))
        try:
            with path.open("rb", buffering=0) as file:
                while size := file.readinto(buffer):
                    found = crc64nvme(buffer[:size], found)
                    if self._closing.is_set():
                        return False
        except OSError as error:
            self._damaged.append(_wrong(path, f"cannot be read: {error.strerror}"))
            return False
        if found == shard.crc64nvme:
            return True
        self._damaged.append(_wrong(path, f"has checksum {found:016x}, the index says {shard.crc64nvme:016x}"))
        return False


def _marker_name(path: Path, shard: Shard) -> str:
    status = path.stat()
    facts = [
        str(path.resolve()),
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        shard.crc64nvme,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _wrong(path: Path, why: str) -> str:
    return problem("shard", str(path), why, fix="restore the file, or tokenize the input again")
