"""Connections to many nodes are made at one moment, by a thread each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fabric import Config

from node_setup.fleet.faults import Fault
from node_setup.fleet.hosts import Node, Route
from node_setup.fleet.known_hosts import KnownHosts
from node_setup.fleet.transport import Connections, Deadline
from tests.node_setup.local_sshd import PATIENT
from tests.ports import own_port

THREADS, EACH = 8, 40


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Threads take turns as often as they can, as on a machine with much else to do."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient_threads")
def test_a_connection_in_the_making_disturbs_no_other(tmp_path: Path) -> None:
    connections = Connections(KnownHosts(str(tmp_path / "known")), PATIENT, Config())
    node = Node("node", "127.0.0.1", route=Route(user="root", port=own_port()))

    def connect(_: int) -> None:
        for _ in range(EACH):
            with pytest.raises(Fault, match="connection refused"):
                connections.connect(node, Deadline(300))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(connect, range(THREADS)))
