"""Promises of direct writes: the same bytes as a plain copy, or a clear no, and an error that says what was wrong."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme

from tests.checkpoint.saving import small_disk
from tests.conftest import require
from trainer.storage import StorageError
from trainer.storage.direct import LEAST_BYTES, SLICE_BYTES, seal, write_direct
from trainer.storage.local import LocalStore

LARGEST = 2 * SLICE_BYTES + 3 * mmap.PAGESIZE + 7


@pytest.fixture
def memory() -> Iterator[int]:
    """Sealed memory with bytes that differ from page to page."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        for page in range(-(-LARGEST // mmap.PAGESIZE)):
            file.write(page.to_bytes(8, "little") * (mmap.PAGESIZE // 8))
    os.truncate(fd, LARGEST)
    seal(fd)
    yield fd
    os.close(fd)


@pytest.mark.slow
@pytest.mark.parametrize("size", [LEAST_BYTES, LEAST_BYTES + 1, SLICE_BYTES, 2 * SLICE_BYTES - 1, LARGEST])
def test_direct_write_gives_the_same_file_and_sum_as_a_plain_one(memory: int, tmp_path: Path, size: int) -> None:
    target = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    found = write_direct(memory, target, size)
    os.close(target)
    require(found is not None, f"the file system of {tmp_path} takes no direct writes")
    expected = os.pread(memory, size, 0)
    assert found == crc64nvme(expected)
    assert (tmp_path / "file").read_bytes() == expected


def test_what_could_change_under_a_mapping_is_not_mapped(memory: int, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(LEAST_BYTES))
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.truncate(unsealed, LEAST_BYTES)
    with (tmp_path / "source").open("rb") as file, (tmp_path / "file").open("w+b") as target:
        for source, size in ((file.fileno(), LEAST_BYTES), (unsealed, LEAST_BYTES), (memory, LARGEST + 1)):
            assert write_direct(source, target.fileno(), size) is None
    os.close(unsealed)


def test_disk_that_fills_during_a_direct_write_is_called_full(memory: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 24) as small:
        store = LocalStore(str(small / "run"))
        size = SLICE_BYTES + LEAST_BYTES
        crc = crc64nvme(os.pread(memory, size, 0))
        store.put_file("first", f"/proc/self/fd/{memory}", size, crc)
        with pytest.raises(StorageError, match="no space left"):
            store.put_file("second", f"/proc/self/fd/{memory}", size, crc)
        target = os.open(small / "third", os.O_RDWR | os.O_CREAT)
        with pytest.raises(OSError, match="No space left"):
            write_direct(memory, target, size)
        os.close(target)
