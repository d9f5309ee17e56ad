"""A test's servers are its own, also where other runs of the tests start theirs at the same moment."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from tests.lab import servers


def test_servers_of_two_runs_never_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as held:
        numbers = set()
        for _ in range(3):
            monkeypatch.setattr(servers, "_CHANCE", random.Random("the same"))
            numbers |= {held.enter_context(one).getsockname()[1] for one in servers.reserve_ports_with_grpc(4)}
    assert len(numbers) == 12
