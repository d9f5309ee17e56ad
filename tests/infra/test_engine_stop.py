"""A command of the engine that is interrupted ends its plug-ins before it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.local import engine
from infra.local.engine import Engine
from tests.processes import wait_until

# In place of pulumi: it has no plug-ins, and only shows whether it is asked to stop and waited for.
PROGRAM = """#!/bin/sh
case "$*" in
    "up "*)
        trap 'kill $!; sleep 0.2; echo stopped >"$PULUMI_HOME.stopped"; exit 1' INT
        touch "$PULUMI_HOME.began"
        sleep 3600 &
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
    began, pressed = tmp_path / "stack" / "home.began", []

    class Interrupted(subprocess.Popen[str]):
        """One Ctrl-C comes while the engine is waited for."""

        def communicate(self, *arguments: Any, **options: Any) -> Any:
            if "up" in self.args and not pressed:
                pressed.append("Ctrl-C")
                wait_until(began.exists)
                raise KeyboardInterrupt
            return super().communicate(*arguments, **options)

    monkeypatch.setattr(engine, "STOP_SECONDS", 300.0)
    monkeypatch.setattr(engine.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Engine(tmp_path / "stack", "rehearsal", {}).up()
    assert (tmp_path / "stack" / "home.stopped").read_text() == "stopped\n"
