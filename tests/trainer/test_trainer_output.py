"""The reader of the output, like `head`, may leave: the command goes on, says nothing of it and keeps its exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINTING = """
import sys
from lustrain.process import ignore_closed_stdout
ignore_closed_stdout()
for _ in range(3):
    print("x" * 100_000)
sys.exit(3)
"""


@pytest.mark.parametrize(("arguments", "code"), [(["-m", "trainer", "--help"], 0), (["-c", PRINTING], 3)])
def test_a_reader_that_has_read_enough_changes_nothing(arguments: list[str], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # Without a buffer argparse hides the error that a command of ours would raise.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *arguments]
    with os.fdopen(writer) as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (code, "")
