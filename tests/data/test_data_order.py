"""The order of samples: what makes a resume with any world size see the same batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.order import MAX_SIZE, sample_ids

seeds = st.integers(min_value=0, max_value=2**63 - 1)


@given(seed=seeds, size=st.integers(1, 3000), epoch=st.integers(0, 2**20))
def test_every_epoch_shows_every_sample_exactly_once(seed: int, size: int, epoch: int) -> None:
    ids = sample_ids(seed, epoch * size, size, size)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(size))


def test_a_large_epoch_is_a_permutation_too() -> None:
    size = 1_000_003
    assert np.array_equal(np.sort(sample_ids(7, 0, size, size)), np.arange(size))


@given(
    seed=seeds,
    size=st.integers(1, 50) | st.integers(1, MAX_SIZE),
    start=st.integers(0, 2**62),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_any_split_over_ranks_and_calls_gives_the_same_order(seed: int, size: int, start: int, cuts: list[int]) -> None:
    whole = sample_ids(seed, start, sum(cuts), size)
    starts = itertools.accumulate(cuts, initial=start)
    parts = [sample_ids(seed, at, count, size) for at, count in zip(starts, cuts, strict=False)]
    assert np.array_equal(whole, np.concatenate([np.empty(0, np.int64), *parts]))
    assert ((whole >= 0) & (whole < size)).all()


@given(seed=seeds, other=seeds, epoch=st.integers(0, 10**6))
def test_other_seeds_and_other_epochs_give_another_order(seed: int, other: int, epoch: int) -> None:
    size = 1000
    first = sample_ids(seed, epoch * size, size, size)
    assert not np.array_equal(first, sample_ids(seed, (epoch + 1) * size, size, size))
    if seed != other:
        assert not np.array_equal(first, sample_ids(other, epoch * size, size, size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_tiny_sets_take_every_possible_order_about_equally_often(size: int) -> None:
    orders: dict[tuple[int, ...], int] = {}
    epochs = 4000
    for epoch in range(epochs):
        order = tuple(sample_ids(11, epoch * size, size, size).tolist())
        orders[order] = orders.get(order, 0) + 1
    possible = len(list(itertools.permutations(range(size))))
    assert len(orders) == possible
    expected = epochs / possible
    chi_square = sum((seen - expected) ** 2 / expected for seen in orders.values())
    assert chi_square < possible + 6 * (2 * possible) ** 0.5


def test_neighbours_in_the_order_are_unrelated_samples() -> None:
    size = 1 << 20
    ids = sample_ids(3, 0, 1 << 16, size).astype(np.float64)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02
    counts = np.histogram(ids, bins=64, range=(0, size))[0]
    assert np.abs(counts - 1024).max() < 6 * 32


@settings(max_examples=20)
@given(size=st.sampled_from([0, -1, MAX_SIZE + 1]))
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="size"):
        sample_ids(1, 0, 1, size)


def test_the_order_is_the_same_for_ever() -> None:
    """A stored run depends on these numbers: a change of them is a change of the format."""
    assert sample_ids(1, 0, 8, 1000).tolist() == [0, 401, 225, 938, 884, 121, 47, 731]
    assert sample_ids(2**63 - 1, 10**15, 4, MAX_SIZE).tolist() == [
        769768350168,
        59730173329,
        143690757172,
        671076963622,
    ]
