"""Verified reading of one committed checkpoint: its manifest, its rank indexes, its data blocks. Torch-free.

Damage to stored bytes is raised as CorruptObjectError that names rank, object and block. Every other StorageError means
that the store could not serve; it says nothing about the checkpoint, and is not caught here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from awscrt.checksums import combine_crc64nvme, crc64nvme

from lustrain.problem import problem
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import (
    BLOCK_BYTES,
    CODEC,
    Entry,
    Manifest,
    NewerFormatError,
    Part,
    RankIndex,
    decode_index,
    decode_manifest,
)
from trainer.sealed import DamagedRecordError
from trainer.storage import CorruptObjectError, ObjectMissingError, ObjectStore, StorageError

T = TypeVar("T")

OnEvent = Callable[[str, dict[str, Any]], None]

STAT_THREADS = 16
"""Requests to the store at a time: two for each rank, a few tens of milliseconds each on S3."""

_DTYPES_BY_SIZE = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
ITEM_BYTES = {name: size for size, names in _DTYPES_BY_SIZE.items() for name in names.split()}
"""Bytes of one element by the dtype's name (torch's, without `torch.`)."""


def ignore_event(kind: str, fields: dict[str, Any]) -> None:
    """Drop an event: for readers without tiers, of which no event can come."""


@dataclass(frozen=True)
class Places:
    """Where a checkpoint's objects may be read: the run is the truth, tiers are quicker copies under the same keys."""

    run: ObjectStore
    tiers: tuple[ObjectStore, ...] = ()


def read_manifest(store: ObjectStore, manifest_id: ManifestId) -> Manifest:
    """Read the manifest of this id; CorruptObjectError when it is missing, damaged or of a different commit."""
    manifest = read_twice(lambda: _decoded_manifest(store, manifest_id))
    if manifest.id != manifest_id:
        raise CorruptObjectError(f"{manifest_id.key}: holds the manifest of {manifest.id.key}")
    if sorted(part.rank for part in manifest.parts) != list(range(manifest.world_size)):
        raise CorruptObjectError(f"{manifest_id.key}: does not name one part for each of {manifest.world_size} ranks")
    return manifest


def _decoded_manifest(store: ObjectStore, manifest_id: ManifestId) -> Manifest:
    try:
        return decode_manifest(store.read(manifest_id.key)[0])
    except ObjectMissingError as error:
        raise CorruptObjectError(f"{manifest_id.key}: the manifest is missing") from error
    except DamagedRecordError as error:
        raise CorruptObjectError(f"{manifest_id.key}: {error}") from error


def read_twice(read: Callable[[], T]) -> T:
    """Return what `read` returns, tried twice: the network may have garbled the first answer; stored damage stays."""
    try:
        return read()
    except (CorruptObjectError, DamagedRecordError):
        return read()


class TierNotes:
    """Why tiers were passed over: damage is an event at once, all parts that a tier lacks are one event in the end.

    On all but the smallest runs a node's tiers hold only a few of the parts, so that one event a part would be noise.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._missing: dict[str, set[int]] = {}

    def pass_over(self, tier: ObjectStore, part: Part, key: str, why: StorageError) -> None:
        if isinstance(why, ObjectMissingError):
            self._missing.setdefault(tier.uri, set()).add(part.rank)
        else:
            self._on_event("tier_passed_over", {"tier": tier.uri, "rank": part.rank, "object": key, "why": str(why)})

    def report_missing(self, parts: int) -> None:
        for uri, ranks in self._missing.items():
            self._on_event("tier_incomplete", {"tier": uri, "parts": parts, "missing": len(ranks)})
        self._missing.clear()


def read_index(places: Places, part: Part, attempt: str, notes: TierNotes | None = None) -> RankIndex:
    """Read one rank's index; CorruptObjectError unless it is what the manifest promises, and consistent in itself."""
    for tier in places.tiers:
        try:
            return _index_of(tier, part, attempt)
        except StorageError as error:
            if notes is not None:
                notes.pass_over(tier, part, part.index_key, error)
    try:
        return read_twice(lambda: _index_of(places.run, part, attempt))
    except ObjectMissingError as error:
        raise CorruptObjectError(
            f"rank {part.rank}, {part.index_key}: missing, though the manifest names it"
        ) from error


def _index_of(store: ObjectStore, part: Part, attempt: str) -> RankIndex:
    where = f"rank {part.rank}, {part.index_key}"
    raw, _ = store.read(part.index_key)
    if len(raw) != part.index_size:
        raise CorruptObjectError(f"{where}: {len(raw)} bytes instead of {part.index_size}")
    _expect_checksum(raw, part.index_crc64nvme, where)
    try:
        index = decode_index(raw)
    except DamagedRecordError as error:
        raise CorruptObjectError(f"{where}: {error}") from error
    contradiction = index_problem(index, part, attempt)
    if contradiction:
        raise CorruptObjectError(f"{where}: {contradiction}")
    return index


def index_problem(index: RankIndex, part: Part, attempt: str) -> str:
    """Return how an index contradicts its manifest or itself, or the empty string.

    Raises NewerFormatError for a codec or dtype that this Lustrain does not know.
    """
    if (index.attempt, index.rank) != (attempt, part.rank):
        return f"belongs to rank {index.rank} of attempt {index.attempt}"
    if index.codec != CODEC:
        fix = "read it with the Lustrain that wrote it, and save again without checkpoint.compression"
        raise NewerFormatError(problem("codec", index.codec, "not read by this Lustrain", allowed=CODEC, fix=fix))
    return _block_problem(index, part) or next(filter(None, (_entry_problem(e, index.size) for e in index.entries)), "")


def _block_problem(index: RankIndex, part: Part) -> str:
    if len(index.blocks) != -(-index.size // BLOCK_BYTES):
        return f"{index.size} bytes cannot be in {len(index.blocks)} blocks"
    end = 0
    whole = 0
    for number, block in enumerate(index.blocks):
        if block.start != end or block.size <= 0:
            return f"block {number} is empty or does not begin where the block before it ends"
        if block.size != logical_size(index, number):
            return f"block {number} has {block.size} bytes instead of {logical_size(index, number)}"
        end += block.size
        whole = combine_crc64nvme(whole, block.crc64nvme, block.size)
    if not end == index.stored_size == part.data_size:
        return f"blocks hold {end} bytes, the index says {index.stored_size}, the manifest {part.data_size}"
    if whole != part.data_crc64nvme:
        return f"its blocks make checksum {whole:016x}, but the manifest says {part.data_crc64nvme:016x}"
    return ""


def _entry_problem(entry: Entry, size: int) -> str:
    if entry.dtype not in ITEM_BYTES:
        why, allowed = "written by a newer Lustrain", ", ".join(ITEM_BYTES)
        raise NewerFormatError(
            problem(f"dtype of {entry.name}", entry.dtype, why, allowed=allowed, fix="upgrade lustrain")
        )
    if not len(entry.shape) == len(entry.offsets) == len(entry.lengths):
        return f"{entry.name}: shape, offsets and lengths differ in dimensions"
    chunk = zip(entry.shape, entry.offsets, entry.lengths, strict=True)
    if any(offset < 0 or length < 0 or offset + length > extent for extent, offset, length in chunk):
        return f"{entry.name}: chunk lies outside the tensor"
    if entry.size != prod(entry.lengths) * ITEM_BYTES[entry.dtype]:
        return f"{entry.name}: {entry.size} bytes do not fit lengths {entry.lengths} of {entry.dtype}"
    if entry.start < 0 or entry.start + entry.size > size:
        return f"{entry.name}: lies outside the part's {size} bytes"
    return ""


def blocks_covering(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers of the blocks that hold any of the byte ranges [start, stop), ascending."""
    wanted: set[int] = set()
    for start, stop in ranges:
        if stop > start:
            wanted.update(range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1))
    return sorted(wanted)


class PartReader:
    """Reads one part's blocks, from a tier that has them or else from the run; different threads may read different blocks."""

    def __init__(self, places: Places, part: Part, index: RankIndex, notes: TierNotes) -> None:
        self.part = part
        self.index = index
        self._places = places
        self._notes = notes
        self._tiers = [tier for tier in places.tiers if self._is_in_tier(tier)]
        self._expect_stored_object()

    def read(self, number: int, target: memoryview) -> None:
        """Fill `target` with one block, verified; CorruptObjectError with its place when no copy of it is whole."""
        for tier in self._tiers:
            try:
                read_block(tier, self.part, self.index, number, target)
            except StorageError as error:
                self._notes.pass_over(tier, self.part, self.part.data_key, error)
            else:
                return
        read_twice(lambda: read_block(self._places.run, self.part, self.index, number, target))

    def _expect_stored_object(self) -> None:
        if self._tiers or not self.index.blocks:
            return
        read_twice(lambda: expect_data(self._places.run, self.part))

    def _is_in_tier(self, tier: ObjectStore) -> bool:
        try:
            size = tier.stat(self.part.data_key).size
            if size != self.part.data_size:
                raise CorruptObjectError(f"{size} bytes instead of {self.part.data_size}")
        except StorageError as error:
            self._notes.pass_over(tier, self.part, self.part.data_key, error)
            return False
        return True


def expect_data(store: ObjectStore, part: Part) -> None:
    """Check by one request that the data object exists with the promised size and, where the store knows it, checksum."""
    where = f"rank {part.rank}, {part.data_key}"
    _expect_stored(store, where, part.data_key, part.data_size, part.data_crc64nvme)


def expect_index(store: ObjectStore, part: Part) -> None:
    """Check the same of the index object."""
    where = f"rank {part.rank}, {part.index_key}"
    _expect_stored(store, where, part.index_key, part.index_size, part.index_crc64nvme)


def check_parts(store: ObjectStore, parts: Sequence[Part]) -> None:
    """Check sizes and, where the store keeps them, checksums of all objects; CorruptObjectError for the first bad one."""
    pool = ThreadPoolExecutor(STAT_THREADS)
    try:
        checks = [pool.submit(expect, store, part) for part in parts for expect in (expect_data, expect_index)]
        for check in checks:
            check.result()
    finally:
        # The first bad answer decides; requests not yet sent would only wait for a store in trouble.
        pool.shutdown(cancel_futures=True)


def _expect_stored(store: ObjectStore, where: str, key: str, size: int, checksum: int) -> None:
    try:
        info = store.stat(key)
    except ObjectMissingError as error:
        raise CorruptObjectError(f"{where}: missing, though the manifest names it") from error
    if info.size != size:
        raise CorruptObjectError(f"{where}: {info.size} bytes instead of {size}")
    if info.crc64nvme is not None and info.crc64nvme != checksum:
        raise CorruptObjectError(f"{where}: stored checksum {info.crc64nvme:016x} instead of {checksum:016x}")


def read_block(store: ObjectStore, part: Part, index: RankIndex, number: int, target: memoryview) -> None:
    """Fill `target` with the logical bytes of one block, verified; CorruptObjectError names the block."""
    where = f"rank {part.rank}, {part.data_key}, block {number}"
    block = index.blocks[number]
    try:
        store.read_into(part.data_key, target, block.start)
    except (CorruptObjectError, ObjectMissingError) as error:
        raise CorruptObjectError(f"{where}: {error}") from error
    _expect_checksum(target, block.crc64nvme, where)


def read_indexes(places: Places, manifest: Manifest) -> list[RankIndex]:
    """Read all ranks' indexes in parallel; CorruptObjectError as `read_index`."""
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        return list(pool.map(lambda part: read_index(places, part, manifest.attempt), manifest.parts))


def logical_size(index: RankIndex, number: int) -> int:
    """Return the bytes of one block; all but a part's last block have BLOCK_BYTES."""
    return min(BLOCK_BYTES, index.size - number * BLOCK_BYTES)


def _expect_checksum(data: bytes | memoryview, expected: int, where: str) -> None:
    actual = crc64nvme(data)
    if actual != expected:
        raise CorruptObjectError(f"{where}: checksum {actual:016x} instead of {expected:016x}")
