"""Ranks share micro-batches: each is computed once, and every rank makes as many passes as the others."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from trainer.step.passes import Pass, passes


@given(micro_batches=st.integers(1, 40), ranks=st.integers(1, 50))
@example(micro_batches=64, ranks=56)
def test_each_micro_batch_counts_once_and_passes_are_equal(micro_batches: int, ranks: int) -> None:
    by_rank = [passes(micro_batches, rank, ranks) for rank in range(ranks)]
    assert {len(mine) for mine in by_rank} == {-(-micro_batches // ranks)}
    counted = [one.number for turn in zip(*by_rank, strict=True) for one in turn if one.counts]
    assert counted == list(range(micro_batches))


@given(micro_batches=st.integers(1, 40), ranks=st.integers(1, 40))
def test_a_surplus_pass_repeats_one_that_counts(micro_batches: int, ranks: int) -> None:
    for rank in range(ranks):
        first, *_ = mine = passes(micro_batches, rank, ranks)
        own = first.number if first.counts else micro_batches - 1
        assert {one.number for one in mine if not one.counts} <= {own}


def test_three_ranks_share_four_micro_batches() -> None:
    assert [passes(4, rank, 3) for rank in range(3)] == [
        [Pass(0, True), Pass(3, True)],
        [Pass(1, True), Pass(1, False)],
        [Pass(2, True), Pass(2, False)],
    ]
