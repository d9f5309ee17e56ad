"""Cutting tensors over ranks: every element once, evenly, aligned."""

from __future__ import annotations

from itertools import product
from math import prod
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.written import held_on
from trainer.checkpoint.format.chunk_plan import data_size, mesh_layout, plan_chunks
from trainer.checkpoint.format.mesh_layout import layout_problem, ranks_storing
from trainer.checkpoint.format.records import ALIGN, BLOCK_BYTES, Entry, MeshAxis, RankIndex
from trainer.chunk import HeldChunk, TensorMeta

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "bool": 1, "int64": 8, "float8_e4m3fn": 1}


@st.composite
def shapes(draw: st.DrawFn, prefix: str) -> list[TensorMeta]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 40]), max_size=3)))
        found.append(TensorMeta(f"{prefix}{number}", dtype, shape, ITEM_BYTES[dtype]))
    return found


def planned(shared: list[TensorMeta], rank: int, world: int) -> tuple[Entry, ...]:
    return plan_chunks([HeldChunk(m, (0,) * len(m.shape), m.shape, ("rank",), rank, world) for m in shared])


def cells(entry: Entry) -> list[tuple[int, ...]]:
    return list(product(*(range(o, o + n) for o, n in zip(entry.offsets, entry.lengths, strict=True))))


@given(shapes("shared."), st.integers(1, 9))
def test_the_pieces_of_all_ranks_hold_each_element_once(shared: list[TensorMeta], world: int) -> None:
    per_rank = [planned(shared, rank, world) for rank in range(world)]
    for shape in shared:
        pieces = [entry for entries in per_rank for entry in entries if entry.name == shape.name]
        assert pieces, "even an empty tensor is recorded"
        assert all((piece.shape, piece.dtype) == (shape.shape, shape.dtype) for piece in pieces)
        found = [cell for piece in pieces for cell in cells(piece)]
        assert sorted(found) == list(product(*map(range, shape.shape)))
        assert sum(piece.size for piece in pieces) == shape.size


@given(shapes("shared."), st.integers(1, 9))
def test_no_rank_stores_more_than_a_row_beyond_its_even_share(shared: list[TensorMeta], world: int) -> None:
    total = sum(shape.size for shape in shared)
    longest = max((row for shape in shared for row in [row_bytes(shape)]), default=0)
    for rank in range(world):
        stored = sum(entry.size for entry in planned(shared, rank, world))
        assert abs(stored - total / world) <= longest + 1


def row_bytes(shape: TensorMeta) -> int:
    rows = next((length for length in shape.shape if length > 1), 1)
    return shape.size // rows


@pytest.mark.slow
@given(shapes("shared."), st.integers(1, 4), st.data())
def test_pieces_are_aligned_runs_of_bytes_and_none_overlap(
    shared: list[TensorMeta], world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    entries = planned(shared, rank, world)
    assert planned(list(reversed(shared)), rank, world) == entries
    end = 0
    for entry in entries:
        assert entry.start % ALIGN == 0
        assert end <= entry.start < end + ALIGN
        assert entry.size == prod(entry.lengths) * ITEM_BYTES[entry.dtype]
        assert contiguous(entry)
        end = entry.start + entry.size
    assert data_size(entries) == end


def contiguous(entry: Entry) -> bool:
    """A box is one run of the tensor's bytes when only one dimension is cut and every one before it has length one."""
    cut = [dim for dim, (n, full) in enumerate(zip(entry.lengths, entry.shape, strict=True)) if n != full]
    return not cut or (len(cut) == 1 and all(length == 1 for length in entry.shape[: cut[0]]))


def test_a_name_that_stands_twice_is_refused() -> None:
    twice = TensorMeta("weight", "float32", (2,), 4)
    with pytest.raises(ValueError, match="weight"):
        planned([twice, twice], 0, 1)


Cuts = dict[str, tuple[int, ...]]
"""Per tensor the dimension that each axis of the mesh cuts, -1 for none."""


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[TensorMeta], Cuts]:
    """A mesh, and tensors with the axes that cut them: as FSDP, HSDP, tensor parallelism and their mixtures do."""
    mesh = draw(st.tuples(*[st.integers(1, 3)] * 3))
    metas = draw(shapes("model/"))
    cuts = {meta.name: tuple(draw(st.integers(-1, len(meta.shape) - 1)) for _ in mesh) for meta in metas}
    return mesh, metas, cuts


def held_by(mesh: tuple[int, ...], place: tuple[int, ...], metas: list[TensorMeta], cuts: Cuts) -> list[HeldChunk]:
    rank = list(product(*map(range, mesh))).index(place)
    named = {
        meta: tuple((dim, axis) for axis, dim in zip("rst", cuts[meta.name], strict=True) if dim >= 0) for meta in metas
    }
    return held_on(dict(zip("rst", mesh, strict=True)), rank, named)


@given(sharded(), st.sampled_from([64, BLOCK_BYTES]), st.data())
def test_ranks_of_any_mesh_store_each_element_once(
    drawn: tuple[tuple[int, int, int], list[TensorMeta], Cuts], block_bytes: int, data: st.DataObject
) -> None:
    mesh, metas, cuts = drawn
    held = [held_by(mesh, place, metas, cuts) for place in product(*map(range, mesh))]
    with patch("trainer.checkpoint.format.chunk_plan.BLOCK_BYTES", block_bytes):
        parts = [plan_chunks(chunks, sharded=True) for chunks in held]
        layout = mesh_layout(held[0], [MeshAxis(*axis) for axis in zip("rst", mesh, strict=True)])
    for meta in metas:
        pieces = [entry for part in parts for entry in part if entry.name == meta.name]
        assert pieces, "even an empty tensor is recorded"
        assert sorted(cell for piece in pieces for cell in cells(piece)) == list(product(*map(range, meta.shape)))
    laid_out = {tensor.name: (group, tensor) for group in layout.groups for tensor in group.tensors}
    assert laid_out.keys() == {meta.name for meta in metas}
    for group, tensor in laid_out.values():
        offsets = tuple(data.draw(st.integers(0, size)) for size in tensor.shape)
        lengths = tuple(data.draw(st.integers(0, size - at)) for at, size in zip(offsets, tensor.shape, strict=True))
        ranks = set(ranks_storing(layout, group, tensor, offsets, lengths))
        there = {cell for rank in ranks for e in parts[rank] if e.name == tensor.name for cell in cells(e)}
        assert there >= set(product(*(range(at, at + n) for at, n in zip(offsets, lengths, strict=True))))
    indexes = [RankIndex("", rank, 0, 0, "none", part, ()) for rank, part in enumerate(parts)]
    assert layout_problem(layout, indexes) == ""


def test_layout_that_is_wrong_about_a_chunk_names_the_tensor() -> None:
    meta = TensorMeta("weight", "float32", (4, 4), 4)
    held = [held_by((1, 2, 1), (0, shard, 0), [meta], {"weight": (-1, 0, -1)}) for shard in range(2)]
    layout = mesh_layout(held[0], [MeshAxis("r", 1), MeshAxis("s", 2), MeshAxis("t", 1)])
    swapped = [RankIndex("", rank, 0, 0, "none", plan_chunks(held[1 - rank]), ()) for rank in range(2)]
    assert "weight" in layout_problem(layout, swapped)


def test_small_chunks_of_several_ranks_lie_on_the_first() -> None:
    norm, weight = TensorMeta("norm", "float32", (8,), 4), TensorMeta("weight", "float32", (8, BLOCK_BYTES // 8), 4)
    cuts = {"weight": (-1, 0, 1), "norm": (-1, 0, -1)}
    first, second = (plan_chunks(held_by((1, 2, 2), (0, 1, t), [weight, norm], cuts), sharded=True) for t in range(2))
    assert [(entry.name, entry.start) for entry in first] == [("weight", 0), ("norm", BLOCK_BYTES)]
    assert [entry.name for entry in second] == ["weight"]


def test_tensors_with_replicas_on_other_ranks_are_cut_apart() -> None:
    """On 2 x 2 ranks each has two replicas, but of one those are neighbours, of the other not."""
    mesh, metas = (1, 2, 2), [TensorMeta("a", "float32", (8,), 4), TensorMeta("b", "float32", (2, 40), 4)]
    cuts = {"a": (-1, 0, -1), "b": (-1, -1, 0)}
    stored = [entry for at in product(*map(range, mesh)) for entry in plan_chunks(held_by(mesh, at, metas, cuts))]
    for meta in metas:
        found = [cell for entry in stored if entry.name == meta.name for cell in cells(entry)]
        assert sorted(found) == list(product(*map(range, meta.shape)))
