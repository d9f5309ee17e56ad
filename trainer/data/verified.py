"""Checks of a local token set against the checksums of its index, with a memory of what is whole.

On a disk of its own each node reads every shard once. On a network file system each shard is read once per job: the
ranks share them out. Whatever the start does not wait for is read slowly beside the training, by one rank per node.

A shard that was found whole leaves a marker in the node's cache folder. Its name is a hash of the file's path, inode,
size, times of change and expected checksum, so a file that is written again, replaced or given another index is read
again. A bit that flips on the disk after that is the disk's and the file system's to find.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from awscrt.checksums import crc64nvme

from lustrain.background import BackgroundThread
from lustrain.file_lock import hold_lock
from lustrain.problem import UserError, problem
from trainer.data.index import Shard

T = TypeVar("T")
log = logging.getLogger(__name__)

READ_BYTES = 4 << 20
"""Out of the page cache 4 MiB at a time were checked at 7 GB/s by one thread, 1 MiB at 4 GB/s and 16 MiB at 6 GB/s."""
WAIT_S = 60.0
"""How long a start waits for the check: some 100 GB from a disk that gives 2 GB/s. A larger set is trained on meanwhile."""
REST = 9.0
"""Beside the training, a pause so many times as long as the read before it: the check takes a tenth of one reader."""
READ_TRIES = 3
RETRY_S = 5.0
"""Before a further try, which a failover of a file server may need."""
SHOWN_PROBLEMS = 8
NETWORK = {"lustre", "nfs", "nfs4", "cifs", "smb3", "ceph", "gpfs", "beegfs", "wekafs"}
"""File system types, as /proc/mounts names them, that several nodes read from the same servers."""


@dataclass(frozen=True)
class Ranks:
    """This process among the job's ranks; the ranks of a node are numbered one after the other."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


ALONE = Ranks()


class Verifier:
    """A background thread that checks the shards of one split; `raise_failure` tells what it found."""

    def __init__(self, root: Path, shards: Sequence[Shard], cache_dir: Path, ranks: Ranks) -> None:
        self._root, self._ranks = root, ranks
        mounts = Path("/proc/mounts")
        kind = file_system(root.resolve(), mounts.read_text() if mounts.exists() else "")
        self._may_be_released = kind == "lustre"
        self._shards = node_share(shards, ranks) if kind in NETWORK else rotated(shards)
        self._markers: Path | None = cache_dir / "verified"
        self._damaged: list[str] = []
        self._closing, self._beside = threading.Event(), threading.Event()
        self._thread = BackgroundThread(self._run, "shard-verify")
        self._thread.start()

    def wait(self, timeout: float | None) -> bool:
        """Wait until the shards are checked; UserError names the damaged ones.

        False when `timeout` seconds did not suffice: from then on the check goes on slowly, on one rank per node.
        """
        self._thread.join(timeout)
        self.raise_failure()
        if self._thread.is_alive():
            self._beside.set()
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
        for shard in self._shards:
            began = time.monotonic()
            self._check(self._root / shard.tokens_key, shard)
            if self._beside.is_set():
                if self._ranks.local_rank:
                    return
                self._closing.wait(REST * (time.monotonic() - began))
            if self._closing.is_set():
                return
        self._damaged.sort()

    def _check(self, path: Path, shard: Shard) -> None:
        """Read the file unless it is known to be whole, or its bytes would have to be restored from elsewhere for that."""
        status = self._with_retries(path, path.stat)
        if status is None or (self._may_be_released and is_released(status)):
            return
        if self._markers is not None:
            try:
                self._check_once(path, shard, self._markers / _marker_name(path, status, shard))
                return
            except OSError as error:
                self._remember_nothing(error)
        self._is_whole(path, shard)

    def _check_once(self, path: Path, shard: Shard, marker: Path) -> None:
        """Read the file unless a process of this node has done so or is doing so; OSError where that cannot be noted."""
        unfinished = marker.with_suffix(".part")
        if marker.exists():
            return
        with hold_lock(unfinished):
            try:
                if not marker.exists() and self._is_whole(path, shard):
                    unfinished.replace(marker)
            finally:
                unfinished.unlink(missing_ok=True)

    def _remember_nothing(self, error: OSError) -> None:
        log.info("token shards are checked anew at every start, the cache folder cannot be used: %s", error)
        self._markers = None

    def _is_whole(self, path: Path, shard: Shard) -> bool:
        """Whether the file was read to its end and is whole; a wrong checksum is damage when a second read finds it too."""
        checksum = None
        for again in (False, True):
            checksum = self._with_retries(path, partial(self._checksum, path, fresh=again))
            if checksum is None or checksum == shard.crc64nvme:
                return checksum is not None
        why = f"has checksum {checksum:016x}, the index says {shard.crc64nvme:016x}"
        self._damaged.append(problem("shard", str(path), why, fix="restore the file, or tokenize the input again"))
        return False

    def _with_retries(self, path: Path, work: Callable[[], T | None]) -> T | None:
        """Return what `work` does; None, and a line in the log, when it raises OSError at every try."""
        for tries_left in reversed(range(READ_TRIES)):
            try:
                return work()
            except OSError as error:
                if not tries_left:
                    log.warning("shard %s is not checked, it could not be read %d times: %s", path, READ_TRIES, error)
                elif self._closing.wait(RETRY_S):
                    break
        return None

    def _checksum(self, path: Path, *, fresh: bool) -> int | None:
        """CRC-64/NVME of the file, `fresh` from the disk and not out of the page cache; None when closed meanwhile."""
        checksum = 0
        buffer = memoryview(bytearray(READ_BYTES))
        with path.open("rb", buffering=0) as file:
            if fresh:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while size := file.readinto(buffer):
                checksum = crc64nvme(buffer[:size], checksum)
                if self._closing.is_set():
                    return None
            if self._beside.is_set():
                # The page cache is for what the training reads.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return checksum


def rotated(shards: Sequence[T]) -> list[T]:
    """Return all shards in an order of this process's own: ranks of a node then work side by side, not on the same one."""
    begin = os.getpid() * 7919 % max(1, len(shards))
    return [*shards[begin:], *shards[:begin]]


def node_share(shards: Sequence[Shard], ranks: Ranks) -> list[Shard]:
    """Return this rank's part of the shards; local rank 0's ends with its node's other parts, which it may finish alone."""
    last = ranks.rank + (1 if ranks.local_rank else ranks.local_size)
    return [shard for rank in range(ranks.rank, last) for shard in shards[rank :: ranks.world_size]]


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system of an absolute path, by the text of /proc/mounts (proc(5)); "" when unknown."""
    best = (-1, "")
    for line in mounts.splitlines():
        _, target, kind, *_ = line.split(" ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), target))
        # Of two mounts on one folder, the later one is seen.
        if path.is_relative_to(mount) and len(mount.parts) >= best[0]:
            best = (len(mount.parts), kind)
    return best[1]


def is_released(status: os.stat_result) -> bool:
    """Whether a file on Lustre has its bytes in the archive only, so that a read would restore them.

    Such a file has one block of 512 bytes, older servers say none (https://jira.whamcloud.com/browse/LU-3864).
    """
    return status.st_blocks <= 1 and status.st_size > 512


def _marker_name(path: Path, status: os.stat_result, shard: Shard) -> str:
    facts = [
        str(path.resolve()),
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        shard.crc64nvme,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
