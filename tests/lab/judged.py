"""What a scenario of the rehearsal comes to."""

from __future__ import annotations

from rehearsal.nodes import Judging, collect
from rehearsal.proof import Promise


def judged(judging: Judging) -> tuple[str, list[Promise]]:
    """Its outcome and its promises."""
    promises: list[Promise] = []
    return collect(judging, promises), promises
