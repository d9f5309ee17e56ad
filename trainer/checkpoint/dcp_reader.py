"""Read a Lustrain checkpoint through `torch.distributed.checkpoint`: verified bytes, any sharding, any number of ranks.

import torch.distributed.checkpoint as dcp
from trainer.checkpoint.dcp_reader import LustrainReader

state = model.state_dict()                      # plain tensors or DTensors
dcp.load(state, storage_reader=LustrainReader("s3://bucket/runs/mine", prefix="model/"))
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.format.records import StoredTensor
from trainer.checkpoint.lineage.history import choose, read_history
from trainer.checkpoint.load.assemble import Region, torch_dtype
from trainer.checkpoint.load.parts import Places, read_manifest
from trainer.checkpoint.load.stored import StoredCheckpoint
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
        manifest = read_manifest(self._store, choose(read_history(self._store), self._store.uri, self._step))
        self._checkpoint = StoredCheckpoint(Places(self._store), manifest)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a further load; a `checkpoint_id` is the URI of a different run."""
        if checkpoint_id is not None:
            self._store = open_store(os.fspath(checkpoint_id), create=False)
            self._open()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes and dtypes of all offered tensors, each as one chunk, so that a plan names regions of tensors."""
        offered = [tensor for tensor in self._checkpoint.tensors() if tensor.name.startswith(self._prefix)]
        return Metadata({tensor.name.removeprefix(self._prefix): _described(tensor) for tensor in offered})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: every rank reads by itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the same plan with the commit that this rank is about to read."""
        return replace(plan, storage_data=self._checkpoint.manifest.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the same plans; UserError unless all ranks read the same commit."""
        commits: set[ManifestId] = {plan.storage_data for plan in plans}
        if len(commits) > 1:
            keys = ", ".join(i.key for i in sorted(commits))
            why = f"ranks found different newest checkpoints ({keys}), because the run is training"
            raise UserError(problem("step", None, why, fix="LustrainReader(uri, step=…)"))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors from the parts that hold what this rank needs, a few blocks in memory at a time."""
        for items in _by_name(plan.items):
            self._fill(items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, items: Mapping[str, ReadItem], planner: LoadPlanner) -> None:
        targets = {name: planner.resolve_tensor(item).detach() for name, item in items.items()}
        regions = {f"{self._prefix}{name}": _region(item) for name, item in items.items()}
        self._checkpoint.read(
            lambda name: regions.get(name, False), {f"{self._prefix}{name}": target for name, target in targets.items()}
        )
        for name, item in items.items():
            planner.commit_tensor(item, targets[name])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a run is read only where this reader is named, never by the look of its folder."""
        return False


def _by_name(items: Sequence[ReadItem]) -> list[dict[str, ReadItem]]:
    """Split the items into dictionaries by name: one of them, unless a rank holds several regions of a tensor."""
    rounds: list[dict[str, ReadItem]] = []
    for item in items:
        name = item.storage_index.fqn
        free = next((each for each in rounds if name not in each), None)
        if free is None:
            rounds.append(free := {})
        free[name] = item
    return rounds


def _region(item: ReadItem) -> Region:
    return Region(tuple(item.storage_offsets), tuple(item.lengths))


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    size = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(tensor.dtype)), size, [chunk])
