"""Promises of the memory that checkpoints are restored into."""

from __future__ import annotations

import pytest

from trainer.checkpoint.load.memory import fresh_memory


@pytest.mark.parametrize("size", [0, 1, 4097, (2 << 20) + 1])
def test_fresh_memory_is_zero_and_writable(size: int) -> None:
    memory = fresh_memory(size)
    assert memory[:] == bytes(len(memory))
    memory[-1:] = b"x"
    assert memory[-1:] == b"x"
