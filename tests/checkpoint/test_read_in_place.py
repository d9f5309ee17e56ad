"""Promises of loading into the memory that training uses: after damage on any rank nothing of what was filled stays on one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lustrain.problem import UserError
from tests.checkpoint.loading import NEW, OLD, empty, remove, swap, truncate, two_checkpoints
from tests.checkpoint.written import assert_same, flip_bit, sample_state, split_state, whole, write_checkpoint
from tests.trainer.ranks import run_threads
from trainer.checkpoint.format.layout import ManifestId
from trainer.checkpoint.load.latest import Loaded, NoneWholeError, load_latest
from trainer.checkpoint.load.parts import Places
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.parallel.shards import LocalShard, local_shard
from trainer.parallel.votes import StoreVotes
from trainer.storage import ObjectStore, StorageError
from trainer.storage.local import LocalStore

State = dict[str, torch.Tensor]


def garbage(like: State) -> State:
    """Memory in use of the same kinds, the first of it with its columns first; no byte of it is in a checkpoint."""
    targets = {name: torch.ones_like(tensor) for name, tensor in like.items()}
    name = next(iter(targets))
    targets[name] = targets[name].T.contiguous().T
    assert not targets[name].is_contiguous()
    return targets


def fill_on(
    views: Sequence[ObjectStore], targets: Sequence[State], candidates: Sequence[ManifestId], on_event: Any = None
) -> list[Any]:
    """What each rank's load into its targets ends with, each rank with its own view of the store."""
    board = torch.distributed.HashStore()
    board.set_timeout(timedelta(seconds=300))

    def load(rank: int) -> Loaded | None:
        shards: dict[str, LocalShard] = {name: local_shard(name, each, ()) for name, each in targets[rank].items()}
        return load_latest(
            views[rank],
            StoreVotes(board, len(views)),
            rank=rank,
            world_size=len(views),
            candidates=candidates,
            read=lambda checkpoint: checkpoint.fill_shards(shards),
            on_event=on_event or (lambda kind, fields: None),
            timeout_s=300,
        )

    return run_threads(len(views), load)


def flip(store: ObjectStore, key: str) -> None:
    flip_bit(store, key, 100)


def views_of_ranks(folder: Path, harm: Callable[[ObjectStore, str], None]) -> list[ObjectStore]:
    """Two ranks' views of two checkpoints; only the second rank's has a damaged part, its other part is whole."""
    views: list[ObjectStore] = [LocalStore(str(folder / f"view{rank}")) for rank in range(2)]
    for view in views:
        damaged = two_checkpoints(view).parts[1].data_key
    harm(views[1], damaged)
    return views


@pytest.mark.parametrize("harm", [flip, truncate, empty, remove, swap])
def test_older_checkpoint_overwrites_all_that_was_filled(
    tmp_path: Path, harm: Callable[[ObjectStore, str], None]
) -> None:
    targets = [garbage(sample_state(1)) for _ in range(2)]
    for end in fill_on(views_of_ranks(tmp_path, harm), targets, [NEW, OLD]):
        assert isinstance(end, Loaded)
        assert end.manifest.id == OLD
    for filled in targets:
        assert_same(filled, sample_state(1))


def test_damage_on_one_rank_without_an_older_one_ends_all_ranks(tmp_path: Path) -> None:
    ends = fill_on(views_of_ranks(tmp_path, flip), [garbage(sample_state(1)) for _ in range(2)], [NEW])
    assert [type(end) for end in ends] == [NoneWholeError] * 2
    assert ends[0].problems[1:] == ends[1].problems[1:]


def test_older_checkpoint_that_lacks_a_filled_tensor_ends_all_ranks(tmp_path: Path) -> None:
    """It could not overwrite what the newer one has left there."""
    views: list[ObjectStore] = [LocalStore(str(tmp_path / f"view{rank}")) for rank in range(2)]
    more = {**sample_state(2), "optim/late/exp_avg": torch.zeros(3)}
    for view in views:
        write_checkpoint(view, OLD.step, split_state(sample_state(1), 2), nonce="00000001")
        damaged = write_checkpoint(view, NEW.step, split_state(more, 2), nonce="00000002").parts[1].data_key
    flip(views[1], damaged)
    ends = fill_on(views, [garbage(more) for _ in range(2)], [NEW, OLD])
    assert [type(end) for end in ends] == [UserError] * 2
    assert all("optim/late/exp_avg" in str(end) for end in ends)


class Failing(LocalStore):
    """Serves one part, and for the other raises this."""

    def __init__(self, uri: str, key: str, error: BaseException) -> None:
        super().__init__(uri)
        self._key, self._error = key, error

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        if key == self._key:
            raise self._error
        super().read_into(key, buffer, offset)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [StorageError("connection refused"), MemoryError()], ids=["store", "memory"])
def test_failure_amid_a_fill_on_one_rank_ends_all_ranks(store: LocalStore, error: Exception, rank: int) -> None:
    """Nothing older is loaded: what failed says nothing about the checkpoint."""
    key = two_checkpoints(store).parts[1].data_key
    views: list[ObjectStore] = [store, store]
    views[rank] = Failing(store.uri, key, error)
    ends = fill_on(views, [garbage(sample_state(1)) for _ in range(2)], [NEW, OLD])
    others = StorageError if isinstance(error, StorageError) else UserError
    assert type(ends[rank]) is type(error)
    assert type(ends[1 - rank]) is others
    assert f"rank {rank}: " in str(ends[1 - rank])


class Late(LocalStore):
    """Answers for a whole part of the newer checkpoint only when its other part was found damaged, and late."""

    def __init__(self, uri: str, late: str, damaged: str) -> None:
        super().__init__(uri)
        self._late, self._damaged = late, damaged
        self._tries = 0
        self._found, self._older = threading.Event(), threading.Event()
        self.overlaps = False

    def read_into(self, key: str, buffer: memoryview, offset: int = 0) -> None:
        if key == self._late:
            self._found.wait(300)
            # Long enough for a load that does not wait for this answer to go on to the older checkpoint.
            self.overlaps |= self._older.wait(0.1)
        elif key != self._damaged:
            self._older.set()
        super().read_into(key, buffer, offset)
        if key == self._damaged:
            self._tries += 1
            if self._tries == 2:
                self._found.set()


def test_no_late_block_of_the_damaged_one_lands_on_the_older(store: LocalStore) -> None:
    parts = two_checkpoints(store).parts
    flip(store, parts[0].data_key)
    view, targets = Late(store.uri, parts[1].data_key, parts[0].data_key), garbage(sample_state(1))
    (end,) = fill_on([view], [targets], [NEW, OLD])
    assert end.manifest.id == OLD
    assert not view.overlaps
    assert_same(targets, sample_state(1))


def test_target_of_another_dtype_gets_values_and_not_bytes(store: LocalStore) -> None:
    """A load that names no dtype, as through torch.distributed.checkpoint, converts like copy_."""
    manifest = write_checkpoint(store, NEW.step, [{"t": whole(torch.tensor([1.5, -2.0]))}])
    target = torch.zeros(2, dtype=torch.float64)
    StoredCheckpoint(Places(store), manifest).read("t".__eq__, {"t": target})
    assert target.tolist() == [1.5, -2.0]
