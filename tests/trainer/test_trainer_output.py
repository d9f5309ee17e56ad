"""The reader of the output, like `head`, may leave: the command goes on, says nothing of it and keeps its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

PRINTING = """
import sys
from lustrain.process import outlive_readers
outlive_readers()
for _ in range(3):
    print("x" * 100_000)
sys.exit(3)
"""


def with_closed_output(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and standard error of a Python whose standard output nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    # Without a buffer argparse hides the error that a command of ours would raise.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["-m", "trainer", "--help"], 0), (["-c", PRINTING], 3)])
def test_a_reader_that_has_read_enough_changes_nothing(arguments: list[str], code: int) -> None:
    assert with_closed_output(arguments) == (code, "")
