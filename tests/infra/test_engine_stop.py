"""A command of the engine that is interrupted ends its plug-ins before it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from infra.local.engine import Engine

# In place of pulumi: it has no plug-ins, and only shows whether it is asked to stop and waited for.
PROGRAM = """#!/bin/sh
case "$*" in
    "up "*)
        trap 'kill $!; sleep 0.2; echo stopped >"$PULUMI_HOME.stopped"; exit 1' INT
        touch "$PULUMI_HOME.began"
        sleep 30 &
        wait
        ;;
esac
"""


def test_an_interrupted_command_is_asked_to_stop_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "pulumi"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    engine = Engine(tmp_path / "stack", "rehearsal", {})
    began = tmp_path / "stack" / "home.began"

    def interrupt() -> None:
        while not began.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        engine.up()
    assert (tmp_path / "stack" / "home.stopped").read_text() == "stopped\n"
