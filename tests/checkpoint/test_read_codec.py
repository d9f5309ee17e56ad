"""Promises of the block codec."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lustrain.problem import UserError
from trainer.checkpoint import codec
from trainer.storage import CorruptObjectError


@given(st.binary(max_size=4099))
def test_any_bytes_come_back_as_they_went_in(data: bytes) -> None:
    assert codec.decode_block(codec.encode_block(memoryview(data)), len(data)) == data


def test_numbers_of_one_magnitude_shrink() -> None:
    data = np.random.default_rng(1).normal(0, 0.02, 1 << 18).astype(np.float32).tobytes()
    assert len(codec.encode_block(data)) < 0.9 * len(data)


@given(st.binary(min_size=1, max_size=500), st.integers(-3, 3).filter(bool))
def test_another_size_than_was_stored_is_corrupt(data: bytes, difference: int) -> None:
    with pytest.raises(CorruptObjectError):
        codec.decode_block(codec.encode_block(data), max(0, len(data) + difference))


def test_bytes_that_were_never_encoded_are_corrupt() -> None:
    with pytest.raises(CorruptObjectError):
        codec.decode_block(b"not a zstd frame", 16)


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    codec._zstandard.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"pip install 'lustrain\[compression\]'"):
        codec.encode_block(b"abcd")
    codec._zstandard.cache_clear()
