"""Marks tests of scenes, so that `make test` leaves them out, and refuses tests outside of scenes that start daemons."""

from __future__ import annotations

import pytest

from tests.prove.scenes import DAEMONS, scene_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if scene_of(item.nodeid):
            item.add_marker(pytest.mark.scene)
        elif started := DAEMONS & set(getattr(item, "fixturenames", ())):
            raise pytest.UsageError(
                f"{item.nodeid} starts {', '.join(sorted(started))} and belongs to no scene; "
                "fix: add it to a scene of tests/prove/scenes.py"
            )
