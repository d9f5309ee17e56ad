"""Promises of the memory that checkpoints are restored into."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.checkpoint.load.memory import fresh_memory, takes_memory_back


@pytest.mark.parametrize(
    ("features", "taken"), [("0110010100", True), ("0110000100", False), ("", False), ("01100", False), (None, False)]
)
def test_a_balloon_that_reports_free_pages_is_told_from_one_that_does_not(
    tmp_path: Path, features: str | None, taken: bool
) -> None:
    if features is not None:
        (tmp_path / "virtio0").mkdir()
        (tmp_path / "virtio0" / "features").write_text(features + "\n")
    assert takes_memory_back(tmp_path) is taken


@pytest.mark.parametrize("size", [0, 1, 4097, (2 << 20) + 1])
def test_fresh_memory_is_zero_and_writable(size: int) -> None:
    memory = fresh_memory(size)
    assert memory[:] == bytes(len(memory))
    memory[-1:] = b"x"
    assert memory[-1:] == b"x"
