"""The tests leave no process behind, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.leftovers import end_those_of


def test_what_works_in_a_folder_of_the_session_ends_with_it_and_nothing_else(tmp_path: Path) -> None:
    homes = (tmp_path / "this" / "home", tmp_path / "that" / "home")
    ours, theirs = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "PULUMI_HOME": str(home)}, start_new_session=True)
        for home in homes
    )
    try:
        assert end_those_of(tmp_path / "this") == [ours.pid]
        assert ours.wait(10) == -signal.SIGKILL
        assert theirs.poll() is None
    finally:
        theirs.kill()
        theirs.wait()
