"""Writes of large memory to a disk past the page cache: half the time of a plain copy, a third of its processor time."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from awscrt.checksums import combine_crc64nvme
from awscrt.checksums import crc64nvme as crc64nvme_of

SLICE_BYTES = 16 << 20
THREADS = 2
"""One slice is on its way to the disk while the next one is summed: 500 MB took 0.19 s, 0.23 s with one thread, 0.29 s
through the page cache (ext4 on a virtual disk); four threads gained nothing."""
LEAST_BYTES = 4 << 20
"""Below this a plain copy is as good."""
_ALIGN = 4096
"""Largest block size of the disks and file systems in use; the kernel refuses a direct write that is not aligned to it."""


def write_direct(source: int, target: int, size: int) -> int | None:
    """Write the first `size` bytes behind `source` to the empty file `target` and return their CRC-64/NVME.

    None where a direct write is impossible; then the target may hold anything. The source must be memory sealed against
    shrinking (anything else could shrink under the mapping, which ends the process), and the file system must take O_DIRECT.
    """
    if size < LEAST_BYTES or not _cannot_shrink(source) or os.fstat(source).st_size < size:
        return None
    aligned = size // _ALIGN * _ALIGN
    # Unmapped with its last slice: closing it by hand would fail where an error's traceback still holds one.
    whole = memoryview(mmap.mmap(source, size, prot=mmap.PROT_READ))
    try:
        with _past_the_cache(target):
            crc = _write(whole[:aligned], target)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    _write_at(target, whole[aligned:], aligned)
    return int(crc64nvme_of(whole[aligned:], crc))


def seal(memory: int) -> None:
    """Fix the size of anonymous memory that was made with MFD_ALLOW_SEALING, for good."""
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _write(whole: memoryview, target: int) -> int:
    def write(start: int) -> tuple[int, int]:
        part = whole[start : start + SLICE_BYTES]
        crc = crc64nvme_of(part)
        _write_at(target, part, start)
        return crc, len(part)

    total = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for crc, size in pool.map(write, range(0, len(whole), SLICE_BYTES)):
            total = combine_crc64nvme(total, crc, size)
    return total


def _write_at(target: int, view: memoryview, at: int) -> None:
    while view:
        done = os.pwrite(target, view, at)
        view, at = view[done:], at + done


@contextmanager
def _past_the_cache(fd: int) -> Iterator[None]:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _cannot_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
