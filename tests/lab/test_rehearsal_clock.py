"""A stage that takes long shows that it lives, and one that does not says nothing more."""

from __future__ import annotations

import threading
import time

import pytest

from rehearsal.clock import clock


def test_a_long_stage_is_told_now_and_then_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    with clock(every_s=0.01):
        end = time.monotonic() + 10
        while said.count("\n") < 2 and time.monotonic() < end:
            said += capsys.readouterr().out
    assert said.splitlines()[0] == "   … 0 s"
    assert "clock" not in [thread.name for thread in threading.enumerate()]
