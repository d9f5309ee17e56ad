"""One committed checkpoint to read from, at once or piece by piece: each rank index is read once, when it is first needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from trainer.checkpoint.format.chunks import collect_chunks
from trainer.checkpoint.format.layout import ATTEMPTS
from trainer.checkpoint.format.records import Manifest, Part, RankIndex, StoredTensor
from trainer.checkpoint.load.assemble import Region, Wanted, read_tensors
from trainer.checkpoint.load.parts import OnEvent, PartReader, Places, TierNotes, ignore_event, read_index
from trainer.parallel.shards import LocalShard
from trainer.storage import ArchivedError
from trainer.storage.archive import refuse_archived

READ_THREADS = min(8, max(4, os.cpu_count() or 4))
"""From the page cache two threads are as fast; a cold disk gave 1.9 GB/s with two and 2.4 with four (two cores)."""


class StoredCheckpoint:
    """Reads from one checkpoint; not for several threads at once.

    Each method raises CorruptObjectError that names damage, and ArchivedError that says how many of the checkpoint's objects a
    lifecycle rule has moved to an archive.
    """

    def __init__(
        self,
        places: Places,
        manifest: Manifest,
        *,
        on_event: OnEvent = ignore_event,
        threads: int = READ_THREADS,
    ) -> None:
        self.manifest = manifest
        self._places, self._on_event, self._threads = places, on_event, threads
        self._indexes: dict[int, RankIndex] = {}
        """By rank."""

    def tensors(self) -> list[StoredTensor]:
        """Return every tensor of the checkpoint; no index is read where the manifest has a layout."""
        if self.manifest.layout is not None:
            return [tensor for group in self.manifest.layout.groups for tensor in group.tensors]
        with self._explains_archive():
            indexes = self._read_indexes(self.manifest.parts, TierNotes(self._on_event))
        first = [chunks[0].entry for chunks in collect_chunks(indexes).values()]
        return [StoredTensor(entry.name, entry.dtype, entry.shape) for entry in first]

    def read(self, want: Wanted, targets: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Copy what is wanted into `targets` or fresh host memory, every byte behind it verified (`read_tensors`)."""
        with self._explains_archive():
            return read_tensors(self.manifest, self._open_parts, want, self._threads, targets)

    def fill_shards(self, shards: Mapping[str, LocalShard]) -> dict[str, torch.Tensor]:
        """Fill what a rank holds, as `read`; UserError for what the checkpoint lacks, or has in another shape or dtype."""

        def want(name: str) -> Region | bool:
            shard = shards.get(name)
            return shard is not None and Region(shard.chunk.offsets, shard.chunk.lengths, shard.chunk.tensor)

        return self.read(want, {name: shard.tensor for name, shard in shards.items()})

    def _open_parts(self, parts: Sequence[Part]) -> list[PartReader]:
        """Open readers of parts: indexes are read and checked, data is not read yet."""
        notes = TierNotes(self._on_event)
        indexes = self._read_indexes(parts, notes)
        with ThreadPoolExecutor(self._threads) as pool:
            # Each asks the store whether the part is there.
            readers = list(pool.map(lambda part, index: PartReader(self._places, part, index, notes), parts, indexes))
        notes.report_missing(len(readers))
        return readers

    def _read_indexes(self, parts: Sequence[Part], notes: TierNotes) -> list[RankIndex]:
        new = [part for part in parts if part.rank not in self._indexes]
        with ThreadPoolExecutor(self._threads) as pool:
            read = list(pool.map(lambda part: read_index(self._places, part, self.manifest.attempt, notes), new))
        self._indexes |= {part.rank: index for part, index in zip(new, read, strict=True)}
        return [self._indexes[part.rank] for part in parts]

    @contextmanager
    def _explains_archive(self) -> Iterator[None]:
        try:
            yield
        except ArchivedError:
            run = self._places.run
            refuse_archived("run", run.uri, run.list(f"{ATTEMPTS}{self.manifest.attempt}/"))
            raise
