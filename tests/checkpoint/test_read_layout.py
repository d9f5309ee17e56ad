"""A rank of a sharded run reads the indexes and the bytes of the parts that hold its chunks, and no others."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lustrain.problem import UserError
from tests.checkpoint.loading import NEW, Counting, load_alone
from tests.checkpoint.written import (
    Cut,
    assert_same,
    cuts_of,
    held_on,
    put_lease,
    read_checkpoint,
    rewrite_manifest,
    store_part,
    write_sharded,
)
from tests.sharded import first_of
from trainer.checkpoint.dcp_reader import LustrainReader
from trainer.checkpoint.format.layout import index_key
from trainer.checkpoint.format.records import BLOCK_BYTES, decode_index
from trainer.checkpoint.load.assemble import Region, cut
from trainer.checkpoint.load.export import export
from trainer.checkpoint.load.parts import Places
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.checkpoint.load.verify import verify_checkpoint
from trainer.parallel.shards import LocalShard
from trainer.storage.local import LocalStore

MESH = {"replicate": 1, "shard": 3}
ROWS = 3 * 9 * BLOCK_BYTES // 8 // 4096
"""Of 1,024 floats: each of three ranks holds a block and an eighth."""


def training_state(rows: int) -> dict[str, Cut]:
    """A matrix, a few norms and the optimizer's counts, as FSDP2 cuts them."""
    state: dict[str, Cut] = {"model/matrix": (torch.arange(rows * 1024.0).view(rows, 1024), ((0, "shard"),))}
    for number in range(10):
        state[f"model/norm{number}"] = (torch.randn(97), ((0, "shard"),))
        state[f"optim/norm{number}/step"] = (torch.tensor(float(number)), ())
    return state


@pytest.mark.slow
def test_rank_reads_its_share_and_the_indexes_of_its_chunks(store: LocalStore) -> None:
    state = training_state(ROWS)
    manifest = write_sharded(store, NEW.step, MESH, state)
    for rank in range(3):
        held = held_on(MESH, rank, cuts_of(state))
        regions = {chunk.tensor.name: Region(chunk.offsets, chunk.lengths, chunk.tensor) for chunk in held}
        counting = Counting(store.uri)
        read = read_checkpoint(counting, manifest, regions.__getitem__)
        assert_same(read, {name: cut(state[name][0], region) for name, region in regions.items()})
        assert sum(counting.bytes.values()) <= 1.2 * sum(chunk.size for chunk in held)
        indexes = {key for key in counting.bytes if key.endswith(".json")}
        assert indexes == {index_key(manifest.attempt, part) for part in {0, rank}}


ODD = {
    "model/embed": (331, 20),
    "model/few": (2, 12),
    "model/one": (1,),
    "model/none": (0, 4),
    "model/frozen": (97, 5),
    "optim/embed/exp_avg": (331, 20),
    "optim/embed/step": (),
}
"""Rows that no mesh divides, fewer rows than ranks, no rows, a weight without optimizer state, and no dimension."""
MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2), (1, 3, 2)]
"""Replicas, shards and tensor ranks: one rank and the seven meshes of the scene."""


def cuts_on(sizes: tuple[int, int, int], shape: tuple[int, ...], by_columns: bool) -> tuple[tuple[int, str], ...]:
    """How FSDP2 and tensor parallelism cut a tensor: the latter first, some by their second dimension."""
    replicate, shard, tensor = sizes
    if not shape or replicate * shard * tensor == replicate:
        return ()
    first = ((1 if by_columns and len(shape) > 1 else 0, "tensor"),) if tensor > 1 else ()
    return (*first, (0, "shard"))


@pytest.mark.slow
@pytest.mark.parametrize("stored", MESHES, ids=str)
def test_every_mesh_fills_what_any_other_stored_to_the_bit(store: LocalStore, stored: tuple[int, int, int]) -> None:
    names = ("replicate", "shard", "tensor")
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in ODD.items()}

    def state_on(sizes: tuple[int, int, int]) -> dict[str, Cut]:
        return {name: (whole, cuts_on(sizes, ODD[name], "few" in name)) for name, whole in tensors.items()}

    manifest = write_sharded(store, NEW.step, dict(zip(names, stored, strict=True)), state_on(stored))
    for sizes in MESHES:
        mesh = dict(zip(names, sizes, strict=True))
        for rank in range(prod(sizes)):
            chunks = held_on(mesh, rank, cuts_of(state_on(sizes)))
            shards = {chunk.tensor.name: LocalShard(chunk, torch.full(chunk.lengths, -1.0)) for chunk in chunks}
            filled = StoredCheckpoint(Places(store), manifest, threads=1).fill_shards(shards)
            regions = {chunk.tensor.name: Region(chunk.offsets, chunk.lengths) for chunk in chunks}
            assert_same(filled, {name: cut(tensors[name], region) for name, region in regions.items()})


def state_of_two_files() -> dict[str, Cut]:
    """Weights of two export files, of which rank 2 holds nothing, and the optimizer's state, of which it holds a third."""
    cut_by_rows = ((0, "shard"),)
    state: dict[str, Cut] = {f"model/{name}": (torch.randn(2, 100), cut_by_rows) for name in ("first", "second")}
    return state | {"optim/first/exp_avg": (torch.randn(3, 100), cut_by_rows)}


def test_export_reads_each_index_once_and_none_of_other_parts(store: LocalStore, tmp_path: Path) -> None:
    manifest = write_sharded(store, NEW.step, MESH, state_of_two_files())
    counting = Counting(store.uri)
    done = export(counting, manifest.id, tmp_path / "out", {}, shard_bytes=800)
    assert len(done.files) == 2
    indexes = {key: count for key, count in counting.bytes.items() if key.startswith("attempts/") and ".json" in key}
    assert indexes == {part.index_key: part.index_size for part in manifest.parts[:2]}


def test_dcp_reader_reads_the_parts_of_its_own_shards(store: LocalStore) -> None:
    state = state_of_two_files()
    manifest = write_sharded(store, NEW.step, MESH, state)
    put_lease(store, 1, (1, None))
    counting = Counting(store.uri)
    with first_of(3):
        mesh = init_device_mesh("cpu", (3,))
        mine = {
            name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]) for name, (tensor, _) in state.items()
        }
        dcp.load(mine, storage_reader=LustrainReader(counting), no_dist=True)
        for name, (tensor, _) in state.items():
            assert torch.equal(mine[name].to_local(), tensor[:1]), name
    read = {key: count for key, count in counting.bytes.items() if key.startswith("attempts/")}
    part = manifest.parts[0]
    assert read == {part.index_key: part.index_size, part.data_key: part.data_size}


def test_layout_that_hides_a_chunk_costs_no_work(store: LocalStore) -> None:
    state = training_state(6)
    manifest = write_sharded(store, NEW.step, MESH, state)
    assert verify_checkpoint(store, NEW).ok
    layout = manifest.layout
    assert layout is not None
    groups = tuple(replace(group, cuts=()) for group in layout.groups)
    rewrite_manifest(store, manifest, layout=replace(layout, groups=groups))
    assert_same(load_alone(store, [NEW]).tensors, {name: tensor for name, (tensor, _) in state.items()})
    assert "model/matrix" in verify_checkpoint(store, NEW).problems[0]


@pytest.mark.parametrize("lost", ["model/matrix", "optim/norm0/step"])
def test_chunk_that_no_part_holds_is_damage_naming_the_tensor(store: LocalStore, lost: str) -> None:
    """A third of the matrix; all of the count."""
    manifest = write_sharded(store, NEW.step, MESH, training_state(6))
    first, *others = manifest.parts
    raw, entries = store.read(first.data_key)[0], decode_index(store.read(first.index_key)[0]).entries
    for key in (first.data_key, first.index_key):
        store.delete(key)
    left = tuple(entry for entry in entries if entry.name != lost)
    rewrite_manifest(store, manifest, parts=(store_part(store, manifest.attempt, 0, left, bytearray(raw)), *others))
    with pytest.raises(UserError, match=f"tensor {lost}: its chunks"):
        load_alone(store, [NEW])
    assert lost in verify_checkpoint(store, NEW).problems[0]
