"""A check of every stored byte of a checkpoint that names every damaged place, without building tensors. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from trainer.checkpoint.format.chunks import chunks_by_name
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.mesh_layout import layout_problem
from trainer.checkpoint.format.records import BLOCK_BYTES, MeshLayout, Part, RankIndex
from trainer.checkpoint.load.parts import Places, expect_data, logical_size, read_block, read_index, read_manifest
from trainer.storage import CorruptObjectError, ObjectStore

_THREADS = 4
OnBytes = Callable[[int], None]
"""Receives how many more stored bytes were checked; called from several threads."""


@dataclass(frozen=True)
class VerifyReport:
    """The result: `problems` has one line per damaged place (rank, object, block), none for a whole checkpoint."""

    id: ManifestId
    bytes: int = 0
    """Stored data bytes that were read."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_checkpoint(
    store: ObjectStore, manifest_id: ManifestId, on_bytes: OnBytes = lambda count: None
) -> VerifyReport:
    """Read and check one checkpoint from end to end in bounded memory; goes on after damage, to name all of it.

    Raises StorageError when the store cannot serve, which says nothing about the checkpoint.
    """
    started = time.monotonic()
    try:
        manifest = read_manifest(store, manifest_id)
    except CorruptObjectError as error:
        return VerifyReport(manifest_id, problems=[str(error)])
    check = _Check(store, on_bytes)
    with ThreadPoolExecutor(_THREADS) as pool:
        indexes = list(pool.map(lambda part: check.index(part, manifest.attempt), manifest.parts))
        for part, index in zip(manifest.parts, indexes, strict=True):
            if index is not None:
                list(pool.map(lambda number, p=part, i=index: check.block(p, i, number), range(len(index.blocks))))
    whole = [index for index in indexes if index is not None]
    if len(whole) == len(indexes):
        check.tensors(whole, manifest.layout)
    checked = sum(index.stored_size for index in whole)
    return VerifyReport(manifest_id, checked, time.monotonic() - started, check.problems)


class _Check:
    """Collects problems; its methods may run in up to `_THREADS` threads at once."""

    def __init__(self, store: ObjectStore, on_bytes: OnBytes) -> None:
        self.problems: list[str] = []
        self._store = store
        self._on_bytes = on_bytes
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_THREADS):
            self._buffers.put(memoryview(bytearray(BLOCK_BYTES)))

    def index(self, part: Part, attempt: str) -> RankIndex | None:
        try:
            index = read_index(Places(self._store), part, attempt)
            expect_data(self._store, part)
        except CorruptObjectError as error:
            self.problems.append(str(error))
            return None
        return index

    def block(self, part: Part, index: RankIndex, number: int) -> None:
        buffer = self._buffers.get()
        try:
            read_block(self._store, part, index, number, buffer[: logical_size(index, number)])
        except CorruptObjectError as error:
            self.problems.append(str(error))
        finally:
            self._buffers.put(buffer)
        self._on_bytes(index.blocks[number].size)

    def tensors(self, indexes: list[RankIndex], layout: MeshLayout | None) -> None:
        try:
            chunks_by_name(indexes)
        except CorruptObjectError as error:
            self.problems.append(str(error))
            return
        if layout is not None and (problem := layout_problem(layout, indexes)):
            self.problems.append(problem)
