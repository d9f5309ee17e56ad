"""The real sshd of this machine that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from node_setup import pack
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.transport import Connections
from tests.conftest import require
from tests.node_setup.local_sshd import PATIENT, Sshd, can_run
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
def own_machine(tmp_path: Path) -> Iterator[Sshd]:
    """An sshd of a test's own, to be started, stopped and given other keys."""
    require(can_run(), "needs sshd and ssh-keygen (openssh-server)")
    server = Sshd(tmp_path / "own-sshd")
    yield server
    server.stop()


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Connections]:
    made = Connections(KnownHosts(str(tmp_path / "known")), PATIENT)
    yield made
    made.stop()


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Sleeper]:
    made = Sleeper(tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed agent."""
    target = tmp_path_factory.mktemp("packed") / "agent.pyz"
    pack.pack(target)
    return target
