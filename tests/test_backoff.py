"""Pauses grow with the tries up to a bound, and are spread over all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lustrain.backoff import pause_s


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_pause_is_within_what_its_try_allows(tried: int, drawn: float) -> None:
    allowed = min(15.0, 0.5 * 2.0 ** min(tried - 1, 20))
    assert 0 <= pause_s(tried, 0.5, 15.0, lambda: drawn) <= allowed
    assert pause_s(tried, 0.5, 15.0, lambda: 1.0) == allowed
