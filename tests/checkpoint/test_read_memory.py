"""Promises of the memory that checkpoints are restored by way of."""

from __future__ import annotations

import mmap
import weakref

import pytest
import torch

from tests.checkpoint.loading import NEW
from tests.checkpoint.written import Boxed, assert_same, whole, write_checkpoint
from trainer.checkpoint.format.records import BLOCK_BYTES
from trainer.checkpoint.load import assemble
from trainer.checkpoint.load.assemble import Region, cut, fresh_memory
from trainer.checkpoint.load.parts import Places
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.storage.local import LocalStore


@pytest.mark.parametrize("size", [0, 1, 4097, (2 << 20) + 1])
def test_fresh_memory_is_zero_and_writable(size: int) -> None:
    memory = fresh_memory(size)
    assert memory[:] == bytes(len(memory))
    memory[-1:] = b"x"
    assert memory[-1:] == b"x"


class Held:
    """Counts the bytes that are held at a time of what `fresh_memory` gave."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def fresh_memory(self, size: int) -> mmap.mmap:
        memory = fresh_memory(size)
        self._add(len(memory))
        weakref.finalize(memory, self._add, -len(memory))
        return memory

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


@pytest.mark.parametrize(("columns", "allowed"), [(1024, 1), (512, 2)], ids=["whole rows", "half of each row"])
def test_load_holds_a_block_at_a_time_beside_the_targets(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, columns: int, allowed: int
) -> None:
    """Two parts of three and a half blocks; a tensor has half a block, and begins within one."""
    state = {f"t{number}": torch.arange(BLOCK_BYTES // 8.0).view(-1, 1024) + number for number in range(14)}
    parts: list[dict[str, Boxed]] = [{"first": whole(torch.ones(99))}, {}]
    for number, (name, tensor) in enumerate(state.items()):
        parts[number // 7][name] = whole(tensor)
    manifest = write_checkpoint(store, NEW.step, parts)
    region = Region((0, 0), (BLOCK_BYTES // 8192, columns))
    targets = {name: torch.zeros(region.lengths) for name in state}
    held = Held()
    monkeypatch.setattr(assemble, "fresh_memory", held.fresh_memory)
    checkpoint = StoredCheckpoint(Places(store), manifest, threads=1)
    checkpoint.read(lambda name: region if name in state else False, targets)
    assert_same(targets, {name: cut(tensor, region) for name, tensor in state.items()})
    assert 0 < held.most <= allowed * BLOCK_BYTES
    assert not held.now
