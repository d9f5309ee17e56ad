"""Cutting tensors over ranks: every element once, evenly, aligned."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.format.chunk_plan import TensorMeta, data_size, plan_chunks
from trainer.checkpoint.format.records import ALIGN, Entry

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "bool": 1, "int64": 8, "float8_e4m3fn": 1}


@st.composite
def shapes(draw: st.DrawFn, prefix: str) -> list[TensorMeta]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 40]), max_size=3)))
        found.append(TensorMeta(f"{prefix}{number}", dtype, shape, ITEM_BYTES[dtype]))
    return found


def cells(entry: Entry) -> list[tuple[int, ...]]:
    return list(product(*(range(o, o + n) for o, n in zip(entry.offsets, entry.lengths, strict=True))))


@given(shapes("shared."), st.integers(1, 9))
def test_the_pieces_of_all_ranks_hold_each_element_of_each_tensor_once(shared: list[TensorMeta], world: int) -> None:
    per_rank = [plan_chunks(shared, [], rank, world) for rank in range(world)]
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
        stored = sum(entry.size for entry in plan_chunks(shared, [], rank, world))
        assert abs(stored - total / world) <= longest + 1


def row_bytes(shape: TensorMeta) -> int:
    rows = next((length for length in shape.shape if length > 1), 1)
    return shape.size // rows


@pytest.mark.slow
@given(shapes("shared."), shapes("own."), st.integers(1, 4), st.data())
def test_every_piece_is_one_aligned_run_of_bytes_and_none_overlap(
    shared: list[TensorMeta], own: list[TensorMeta], world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    entries = plan_chunks(shared, own, rank, world)
    assert plan_chunks(list(reversed(shared)), list(reversed(own)), rank, world) == entries
    end = 0
    for entry in entries:
        assert entry.start % ALIGN == 0
        assert end <= entry.start < end + ALIGN
        assert entry.size == prod(entry.lengths) * ITEM_BYTES[entry.dtype]
        assert contiguous(entry)
        end = entry.start + entry.size
    assert data_size(entries) == end
    assert [entry.name for entry in entries if entry.name.startswith("own.")] == sorted(shape.name for shape in own)


def contiguous(entry: Entry) -> bool:
    """A box is one run of the tensor's bytes when only one dimension is cut and every one before it has length one."""
    cut = [dim for dim, (n, full) in enumerate(zip(entry.lengths, entry.shape, strict=True)) if n != full]
    return not cut or (len(cut) == 1 and all(length == 1 for length in entry.shape[: cut[0]]))


def test_a_name_that_stands_twice_is_refused() -> None:
    twice = TensorMeta("weight", "float32", (2,), 4)
    with pytest.raises(ValueError, match="weight"):
        plan_chunks([twice], [twice], 0, 1)
