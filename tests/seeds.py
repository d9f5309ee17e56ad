"""Tests that strike at random do it otherwise in every run: one seed for all of them, told at the end, repeats a run.

What is repeated are victims and moments as they are drawn, not how the machine schedules.
"""

from __future__ import annotations

import os
import random
from typing import Any

VARIABLE = "LUSTRAIN_SEED"


def chance(of: str) -> random.Random:
    """Random numbers of one test, which do not depend on what other tests draw."""
    return random.Random(f"{os.environ[VARIABLE]} {of}")


def pytest_configure() -> None:
    # Before workers are started, so that they share it.
    os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(10**6)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{VARIABLE}={os.environ[VARIABLE]} repeats what was drawn at random")
