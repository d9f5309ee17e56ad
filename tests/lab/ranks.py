"""The fixture that hands a test ranks: processes with torch loaded, which end with the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory, no_account: None) -> Iterator[ForkServer]:
    """One for all tests of this process."""
    server = ForkServer(tmp_path_factory.mktemp("ranks"))
    try:
        yield server
    finally:
        server.close()
