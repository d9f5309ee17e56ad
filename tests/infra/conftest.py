"""One embedded AWS for all tests that look at it through its API; each module makes a network and names of its own in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.local.aws import LocalAws
from tests.infra.local_network import Network


@pytest.fixture(scope="session")
def aws() -> Iterator[LocalAws]:
    with LocalAws() as server:
        yield server


@pytest.fixture(scope="module")
def network(aws: LocalAws) -> Network:
    return Network(aws)
