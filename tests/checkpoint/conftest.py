"""What the tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))
