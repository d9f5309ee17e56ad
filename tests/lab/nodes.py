"""The fixture that hands a test real nodes: `lab(3, "p5")` boots three, which end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rehearsal.lab.nodes import Lab, why_not

StartLab = Callable[..., Lab]


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[StartLab]:
    """Boots `lab(count, kind="cpu")`; needs root, and says in one line what else is missing."""
    from tests.conftest import require

    assert request.node.get_closest_marker("scene"), "boots nodes and belongs to no scene of tests/prove/scenes.py"

    require(why_not() is None, str(why_not()))
    with ExitStack() as running:

        def start(
            count: int, kind: str = "cpu", folders: Iterable[Path | str] = (), metadata: bool = False, off: int = 0
        ) -> Lab:
            return running.enter_context(Lab(count, kind, folders, metadata, off))

        yield start
