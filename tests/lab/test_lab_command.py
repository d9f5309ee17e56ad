"""`python -m rehearsal.lab`: nodes for whoever wants to try `fab` on some, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lustrain.problem import DIFFERS
from rehearsal.lab.nodes import why_not
from tests.conftest import require


@pytest.mark.slow
def test_its_output_lets_fab_reach_nodes_and_ctrl_c_cleans_up(tmp_path: Path) -> None:
    require(why_not() is None, str(why_not()))
    command = [sys.executable, "-m", "rehearsal.lab", "--nodes", "1", "--kind", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as lab:
        assert lab.stdout is not None
        exported: dict[str, str] = {}
        while len(exported) < 2:
            line = lab.stdout.readline()
            assert line, "it ended"
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").strip().partition("=")
                exported[name] = value
        fab = [sys.executable, "-m", "fabric", "node-tune", "--check", "--strict-host-keys"]
        check = subprocess.run(fab, env={**os.environ, **exported}, capture_output=True, text=True, check=False)
        lab.send_signal(signal.SIGINT)
        assert lab.wait(300) == 0
    assert check.returncode == DIFFERS, check.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--nodes", "0"], ["--nodes", "x"], ["--kind", "p6"]])
def test_what_there_is_not_is_refused(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "rehearsal.lab", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words[1] in done.stderr
    assert "Traceback" not in done.stderr
