"""A stage that takes long shows that it lives, and one that does not says nothing more."""

from __future__ import annotations

import re
import threading

import pytest

from rehearsal.clock import clock
from tests.processes import wait_until


def test_a_long_stage_is_told_now_and_then_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def ticked() -> bool:
        said.extend(capsys.readouterr().out.splitlines())
        return len(said) >= 2

    with clock(every_s=0.01):
        wait_until(ticked)
    assert re.fullmatch(r"   … \d+ s", said[0])
    assert "clock" not in [thread.name for thread in threading.enumerate()]
