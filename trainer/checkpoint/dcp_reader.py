"""Read a Lustrain checkpoint through `torch.distributed.checkpoint`: verified bytes, any sharding, any number of ranks.

import torch.distributed.checkpoint as dcp
from trainer.checkpoint.dcp_reader import LustrainReader

state = model.state_dict()                      # plain tensors or DTensors
dcp.load(state, storage_reader=LustrainReader("s3://bucket/runs/mine", prefix="model/"))
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lustrain.problem import UserError, problem
from trainer.checkpoint.format.chunks import Chunk, chunks_by_name
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import Entry
from trainer.checkpoint.lineage.history import choose, read_history
from trainer.checkpoint.load.assemble import Region, chunk_tensor, cut, rows_holding, torch_dtype
from trainer.checkpoint.load.latest import READ_THREADS
from trainer.checkpoint.load.parts import (
    PartReader,
    Places,
    TierNotes,
    blocks_covering,
    fetch_blocks,
    ignore_event,
    read_indexes,
    read_manifest,
)
from trainer.storage import ObjectStore, open_store


class LustrainReader(StorageReader):
    """A storage reader over one checkpoint of a run, given as URI or store.

    `step` picks the checkpoint (None: the newest live one). Give it where the run still trains: otherwise the ranks may find
    different newest ones, which ends the load. Only tensors whose names begin with `prefix` are offered, without the prefix.
    UserError when the run has no such checkpoint. Bytes that do not verify never reach a tensor: CorruptObjectError ends
    the load, and the tensors that were filled before are not a whole checkpoint.
    """

    def __init__(self, run: str | ObjectStore, *, step: int | None = None, prefix: str = "") -> None:
        super().__init__()
        self._store = open_store(run, create=False) if isinstance(run, str) else run
        self._step = step
        self._prefix = prefix
        self._open()

    def _open(self) -> None:
        self._places = Places(self._store)
        self._manifest = read_manifest(self._store, choose(read_history(self._store), self._store.uri, self._step))
        self._indexes = read_indexes(self._places, self._manifest)
        self._chunks = {
            name.removeprefix(self._prefix): chunks
            for name, chunks in chunks_by_name(self._indexes).items()
            if name.startswith(self._prefix)
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a further load; a `checkpoint_id` is the URI of a different run."""
        if checkpoint_id is not None:
            self._store = open_store(os.fspath(checkpoint_id), create=False)
            self._open()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes, dtypes and chunks of all offered tensors."""
        return Metadata({name: _described(chunks) for name, chunks in self._chunks.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: every rank reads by itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the same plan with the commit that this rank is about to read."""
        return replace(plan, storage_data=self._manifest.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the same plans; UserError unless all ranks read the same commit."""
        commits: set[ManifestId] = {plan.storage_data for plan in plans}
        if len(commits) > 1:
            keys = ", ".join(i.key for i in sorted(commits))
            why = f"ranks found different newest checkpoints ({keys}), because the run is training"
            raise UserError(problem("step", None, why, fix="LustrainReader(uri, step=…)"))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, one part's needed blocks in memory at a time."""
        wanted: dict[int, list[tuple[tuple[Entry, Region], ReadItem]]] = {}
        for item in plan.items:
            chunk = self._chunk_of(item)
            region = Region(tuple(item.storage_offsets), tuple(item.lengths))
            wanted.setdefault(chunk.part, []).append((rows_holding(chunk.entry, region), item))
        for part in sorted(wanted):
            reader = PartReader(self._places, self._manifest.parts[part], self._indexes[part], TierNotes(ignore_event))
            ranges = [(rows.start, rows.start + rows.size) for (rows, _), _ in wanted[part]]
            fetch_blocks([(reader, number) for number in blocks_covering(ranges)], READ_THREADS)
            for (rows, region), item in wanted[part]:
                target = planner.resolve_tensor(item).detach()
                target.copy_(cut(chunk_tensor(reader, rows), region))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a run is read only where this reader is named, never by the look of its folder."""
        return False

    def _chunk_of(self, item: ReadItem) -> Chunk:
        offset = tuple(item.storage_index.offset or ())
        for chunk in self._chunks[item.storage_index.fqn]:
            if chunk.entry.offsets == offset or not offset:
                return chunk
        raise KeyError(f"{item.storage_index.fqn} has no chunk at {offset}")


def _described(chunks: Sequence[Chunk]) -> TensorStorageMetadata:
    first = chunks[0].entry
    sizes = [ChunkStorageMetadata(torch.Size(c.entry.offsets), torch.Size(c.entry.lengths)) for c in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(first.dtype)), torch.Size(first.shape), sizes)
