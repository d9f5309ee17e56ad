"""Pauses grow with the tries up to a bound, and are spread over all of it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lustrain.backoff import pause_s


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_pause_is_within_what_its_try_allows(tried: int, drawn: float) -> None:
    allowed = min(15.0, 0.5 * 2.0 ** min(tried - 1, 20))
    assert 0 <= pause_s(tried, 0.5, 15.0, lambda: drawn) <= allowed
    assert pause_s(tried, 0.5, 15.0, lambda: 1.0) == allowed


def test_a_pause_takes_no_number_from_the_stream_of_the_process() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    pauses = {pause_s(9, 0.5, 15.0) for _ in range(9)}
    assert (random.random(), len(pauses)) == (expected, 9)
