"""Promises of loading: what verifies comes back bit for bit, what does not is reported and never loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lustrain.problem import UserError
from tests.checkpoint.loading import (
    NEW,
    OLD,
    Counting,
    Unreachable,
    empty,
    load_alone,
    load_on,
    prolong,
    remove,
    swap,
    truncate,
    two_checkpoints,
)
from tests.checkpoint.saving import Events, checkpointer, sample_tensors, save_one
from tests.checkpoint.stores import FlippedOnce
from tests.checkpoint.written import (
    Boxed,
    assert_same,
    flip_bit,
    read_checkpoint,
    rewrite_manifest,
    rows,
    sample_state,
    split_state,
    whole,
    write_checkpoint,
    write_part,
)
from tests.trainer.ranks import run_threads
from trainer.checkpoint.format.layout import attempt_name
from trainer.checkpoint.format.records import BLOCK_BYTES, decode_manifest
from trainer.checkpoint.load.assemble import Region, cut
from trainer.checkpoint.load.latest import load_latest
from trainer.checkpoint.load.parts import Places
from trainer.checkpoint.load.stored import StoredCheckpoint
from trainer.config import TierConfig
from trainer.parallel.shards import LocalShard, chunk_of, local_shard
from trainer.parallel.votes import StoreVotes
from trainer.storage import ObjectStore, StorageError
from trainer.storage.local import LocalStore


@pytest.mark.parametrize("worlds", [(1, 1), (2, 2), (2, 1), (2, 3), (3, 2)], ids=str)
def test_any_world_size_loads_the_bytes_that_another_one_saved(store: LocalStore, worlds: tuple[int, int]) -> None:
    saved, loading = worlds
    write_checkpoint(store, NEW.step, split_state(sample_state(2), saved))
    for loaded in load_on([store] * loading, [NEW]):
        assert loaded is not None
        assert loaded.skipped == []
        assert_same(loaded.tensors, sample_state(2))


def test_blocks_in_an_earlier_codec_are_refused_and_not_misread(store: LocalStore) -> None:
    write_checkpoint(store, NEW.step, split_state(sample_state(2), 1), codec="planes-zstd")
    with pytest.raises(UserError, match="codec = 'planes-zstd': not read by this Lustrain; allowed: none"):
        load_alone(store, [NEW])


def test_each_rank_gets_what_it_wants_and_nothing_else(store: LocalStore) -> None:
    write_checkpoint(store, NEW.step, split_state(sample_state(2), 2))
    names = sorted(sample_state(2))
    loaded = load_on([store] * 2, [NEW], lambda rank, name: names.index(name) % 2 == rank)
    for rank, got in enumerate(loaded):
        assert got is not None
        assert_same(got.tensors, {name: sample_state(2)[name] for name in names[rank::2]})


def test_every_tensor_that_does_not_fit_is_named_before_any_read(store: LocalStore) -> None:
    """Also where a rank's part has the same size as the whole that is stored."""
    ranks = [
        {"a": whole(torch.ones(4, 8)), "b": whole(torch.ones(3)), "c": whole(torch.ones(2)), "d": whole(torch.ones(1))}
    ]
    manifest = write_checkpoint(store, NEW.step, ranks)
    checkpoint = StoredCheckpoint(Places(counting := Counting(store.uri)), manifest)
    held = {
        "a": held_whole("a", torch.zeros(4, 8), of=(8, 8)),
        "b": held_whole("b", torch.zeros(3, dtype=torch.float64)),
        "c": held_whole("c", torch.zeros(2)),
    }
    with pytest.raises(UserError) as refused:
        checkpoint.fill_shards(held)
    assert [line.split(" = ")[0] for line in refused.value.problems] == ["a", "b"]
    with pytest.raises(UserError) as refused:
        checkpoint.fill_shards({name: held_whole(name, torch.zeros(2)) for name in ("c", "e")})
    assert [line.split()[0] for line in refused.value.problems] == ["e"]
    assert not counting.offsets
    assert checkpoint.fill_shards({"c": held["c"]})["c"].tolist() == [1.0, 1.0]


def held_whole(name: str, tensor: torch.Tensor, of: tuple[int, ...] | None = None) -> LocalShard:
    """A tensor that a rank holds, as all of one of shape `of`, by default its own."""
    shard = local_shard(name, tensor, ())
    return replace(
        shard, chunk=replace(shard.chunk, tensor=replace(shard.chunk.tensor, shape=of or tuple(tensor.shape)))
    )


@st.composite
def stored_grids(draw: st.DrawFn) -> tuple[torch.Tensor, list[Boxed], Region]:
    """A tensor, the chunks of a grid over it, and a region of it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5]), max_size=3)))
    tensor = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    parts = [draw(st.integers(1, min(length, 3))) for length in shape]
    chunks = []
    for place in product(*map(range, parts)):
        offsets, lengths = chunk_of(shape, list(zip(count(), parts, place, strict=False)))
        if 0 not in lengths:
            chunks.append((cut(tensor, Region(offsets, lengths)), shape, offsets))
    starts = tuple(draw(st.integers(0, length)) for length in shape)
    lengths = tuple(draw(st.integers(0, length - at)) for at, length in zip(starts, shape, strict=True))
    return tensor, chunks, Region(starts, lengths)


@given(stored_grids())
def test_region_read_from_any_grid_is_what_the_whole_has_there(drawn: tuple[torch.Tensor, list[Boxed], Region]) -> None:
    tensor, chunks, region = drawn
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(folder)
        manifest = write_checkpoint(store, NEW.step, [{"t": chunk} for chunk in chunks])
        read = read_checkpoint(store, manifest, lambda name: region)
    assert_same(read, {"t": cut(tensor, region)})


@pytest.mark.slow
def test_region_reads_the_blocks_of_its_rows_alone(store: LocalStore) -> None:
    rows_of_a_block = BLOCK_BYTES // 4 // 1024
    big = torch.arange(4 * rows_of_a_block * 1024, dtype=torch.float32).view(-1, 1024)
    manifest = write_checkpoint(store, NEW.step, [{"big": whole(big)}])
    region = Region((rows_of_a_block + 1, 7), (rows_of_a_block - 2, 9))
    counting = Counting(str(store.root))
    read = read_checkpoint(counting, manifest, lambda name: region)
    assert_same(read, {"big": cut(big, region)})
    assert counting.offsets == [BLOCK_BYTES]


def test_region_outside_its_tensor_is_refused(store: LocalStore) -> None:
    manifest = write_checkpoint(store, NEW.step, [{"t": whole(torch.ones(2, 3))}])
    for region in (Region((1, 0), (2, 3)), Region((0,), (2,))):
        with pytest.raises(ValueError, match="t: "):
            read_checkpoint(store, manifest, lambda name, region=region: region)


@pytest.mark.slow
def test_damage_in_tensors_of_several_blocks_names_the_block(store: LocalStore) -> None:
    big = torch.arange(3 * BLOCK_BYTES // 4 + 5, dtype=torch.float32)
    half = len(big) // 2
    write_checkpoint(store, OLD.step, [{"big": whole(big)}], nonce="00000001")
    newer = write_checkpoint(store, NEW.step, [{"big": rows(big, 0, half)}, {"big": rows(big, half, len(big))}])
    assert_same(load_alone(store, [NEW, OLD]).tensors, {"big": big})
    flip_bit(store, newer.parts[1].data_key, BLOCK_BYTES + 17)
    loaded = load_alone(store, [NEW, OLD])
    assert loaded.manifest.id == OLD
    assert "rank 1" in loaded.skipped[0]
    assert f"{newer.parts[1].data_key}, block 1: checksum" in loaded.skipped[0]


def test_loaded_tensors_can_change_without_touching_checkpoint(store: LocalStore) -> None:
    write_checkpoint(store, NEW.step, split_state(sample_state(2), 2))
    for tensor in load_alone(store, [NEW]).tensors.values():
        tensor.zero_()
    assert_same(load_alone(store, [NEW]).tensors, sample_state(2))


@given(st.sampled_from(["data", "index", "manifest"]), st.integers(0, 1), st.integers(0, 10**6), st.integers(0, 7))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_one_flipped_bit_is_noticed_and_older_checkpoint_loads(
    tmp_path: Path, region: str, part: int, position: int, bit: int
) -> None:
    store = LocalStore(str(tmp_path / "run"))
    if not list(store.list()):
        two_checkpoints(store)
    manifest = decode_manifest(store.read(NEW.key)[0])
    key = {"data": manifest.parts[part].data_key, "index": manifest.parts[part].index_key, "manifest": NEW.key}[region]
    before = store.read(key)[0]
    flip_bit(store, key, position, bit)
    try:
        loaded = load_alone(store, [NEW, OLD])
        assert loaded.manifest.id == OLD
        assert_same(loaded.tensors, sample_state(1))
        assert key in loaded.skipped[0]
    finally:
        store.put(key, before)


@pytest.mark.parametrize("harm", [truncate, prolong, empty, remove, swap])
@pytest.mark.parametrize("region", ["data", "index", "manifest"])
def test_damaged_object_sends_the_load_to_the_older_checkpoint(
    store: LocalStore, region: str, harm: Callable[[ObjectStore, str], None]
) -> None:
    part = two_checkpoints(store).parts[1]
    key = {"data": part.data_key, "index": part.index_key, "manifest": NEW.key}[region]
    harm(store, key)
    loaded = load_alone(store, [NEW, OLD])
    assert loaded.manifest.id == OLD
    assert_same(loaded.tensors, sample_state(1))
    assert len(loaded.skipped) == 1
    assert key in loaded.skipped[0]


def test_valid_part_of_another_attempt_is_passed_over(store: LocalStore) -> None:
    manifest = two_checkpoints(store)
    foreign = write_part(store, attempt_name(1, 15, "0000000f"), 1, split_state(sample_state(3), 2)[1])
    rewrite_manifest(store, manifest, parts=(manifest.parts[0], foreign))
    loaded = load_alone(store, [NEW, OLD])
    assert loaded.manifest.id == OLD
    assert "belongs to rank 1 of attempt 000001-0000000015-0000000f" in loaded.skipped[0]


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([{"w": rows(torch.ones(4, 2), 0, 2)}, {}], "do not add up"),
        ([{"w": rows(torch.ones(4, 2), 0, 3)}, {"w": rows(torch.ones(4, 2), 2, 3)}], "overlap"),
        ([{"w": rows(torch.ones(4, 2), 0, 2)}, {"w": rows(torch.ones(4, 2).double(), 2, 4)}], "disagree"),
        ([{"w": whole(torch.ones(4))}, {"w": whole(torch.ones(4))}], "do not add up"),
    ],
)
def test_boxes_that_do_not_make_the_tensor_are_never_loaded(store: LocalStore, ranks: list[Any], why: str) -> None:
    write_checkpoint(store, NEW.step, ranks)
    with pytest.raises(UserError, match=why):
        load_alone(store, [NEW])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda view, manifest: flip_bit(view, manifest.parts[0].data_key, 100), "found by rank 1"),
        (lambda view, manifest: rewrite_manifest(view, manifest, state={"step": 21}), "different manifests"),
    ],
)
def test_one_ranks_other_view_takes_all_to_older_checkpoint(tmp_path: Path, damage: Any, why: str) -> None:
    views: list[ObjectStore] = [LocalStore(str(tmp_path / f"view{rank}")) for rank in range(2)]
    for view in views:
        manifest = two_checkpoints(view)
    damage(views[1], manifest)
    for loaded in load_on(views, [NEW, OLD]):
        assert loaded is not None
        assert loaded.manifest.id == OLD
        assert why in loaded.skipped[0]


@pytest.mark.slow
def test_saves_fast_copy_loads_while_store_serves_records_only(store: LocalStore, tmp_path: Path) -> None:
    tiers = (TierConfig(kind="nvme", path=str(tmp_path / "nvme")),)
    with checkpointer(store, Events(), tiers=tiers) as saver:
        assert all(save_one(saver, step, sample_tensors(step)).committed for step in (10, 20))
    for view, places in ((Unreachable(store.uri), tiers), (store, ())):
        loaded = load_alone(view, [NEW, OLD], tiers=places)
        assert loaded.manifest.id == NEW
        assert_same(loaded.tensors, sample_tensors(20))


def test_no_candidates_mean_a_fresh_start_on_every_rank(store: LocalStore) -> None:
    assert load_on([store] * 2, []) == [None, None]


def test_candidates_that_all_fail_are_error_and_no_fresh_start(store: LocalStore) -> None:
    manifest = two_checkpoints(store)
    flip_bit(store, manifest.parts[0].data_key, 0)
    store.delete(OLD.key)
    with pytest.raises(UserError) as caught:
        load_alone(store, [NEW, OLD])
    assert "holds 2 checkpoints, but none verifies" in caught.value.problems[0]
    assert [NEW.key in caught.value.problems[1], OLD.key in caught.value.problems[2]] == [True, True]


def test_unreachable_store_is_a_storage_error_on_every_rank(store: LocalStore) -> None:
    two_checkpoints(store)
    board = torch.distributed.HashStore()

    def load(rank: int) -> Any:
        view, votes = Unreachable(store.uri) if rank == 1 else store, StoreVotes(board, 2)
        hooks: dict[str, Any] = {
            "read": lambda checkpoint: checkpoint.read(lambda name: True),
            "on_event": lambda kind, fields: None,
        }
        return load_latest(view, votes, rank=rank, world_size=2, candidates=[NEW, OLD], timeout_s=300, **hooks)

    errors = run_threads(2, load)
    assert [type(error) for error in errors] == [StorageError] * 2
    assert all("connection refused" in str(error) for error in errors)


@pytest.mark.parametrize("broken", [0, 1])
def test_rank_that_runs_out_of_memory_ends_the_load_on_all(store: LocalStore, broken: int) -> None:
    two_checkpoints(store)
    board = torch.distributed.HashStore()

    def load(rank: int) -> Any:
        def read(checkpoint: StoredCheckpoint) -> dict[str, torch.Tensor]:
            if rank == broken:
                raise MemoryError
            return checkpoint.read(lambda name: True)

        hooks: dict[str, Any] = {"read": read, "on_event": lambda kind, fields: None}
        return load_latest(
            store, StoreVotes(board, 3), rank=rank, world_size=3, candidates=[NEW, OLD], timeout_s=300, **hooks
        )

    errors = run_threads(3, load)
    assert type(errors.pop(broken)) is MemoryError
    assert [(error.problems, error.exit_code) for error in errors] == [([f"rank {broken}: MemoryError"], 1)] * 2


def test_a_newer_format_stops_the_load_and_nothing_older_loads(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(store, OLD.step, split_state(sample_state(1), 2), nonce="00000001")
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.format.records.FORMAT", 2)
        write_checkpoint(store, NEW.step, split_state(sample_state(2), 2), nonce="00000002")
    with pytest.raises(UserError, match="newer Lustrain"):
        load_alone(store, [NEW, OLD])


def test_bytes_that_only_the_wire_damaged_are_read_again(store: LocalStore) -> None:
    two_checkpoints(store)
    loaded = load_alone(FlippedOnce(store.uri), [NEW, OLD])
    assert loaded.manifest.id == NEW
    assert_same(loaded.tensors, sample_state(2))
