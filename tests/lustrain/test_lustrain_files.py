"""A file that is replaced whole is the old one or the new one, whatever fails on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lustrain.files import write_whole


def test_the_new_file_has_its_content_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_whole(path, b"new", 0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fchmod", "fsync", "replace"])
def test_a_failure_at_any_step_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
