"""The real sshd of this machine that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.node_setup.local_sshd import Sshd, can_run
from tests.node_setup.meanwhile import Sleeper


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """Programs that a test puts into its folder's `bin` go before those of this machine."""
    require(can_run(), "needs sshd and ssh-keygen (openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    (folder / "bin").mkdir()
    server = Sshd(folder, path=folder / "bin")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Sleeper]:
    made = Sleeper(tmp_path)
    yield made
    made.end()
