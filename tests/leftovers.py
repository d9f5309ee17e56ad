"""What a cut-off run of the tests leaves behind: the engine's plug-ins outlive it for minutes, in groups of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


def pytest_unconfigure(config: pytest.Config) -> None:
    """End them, once all processes of the tests are gone."""
    folder: Path | None = getattr(getattr(config, "_tmp_path_factory", None), "_basetemp", None)
    if folder and not hasattr(config, "workerinput"):
        end_those_of(folder)


def end_those_of(folder: Path) -> list[int]:
    """Kill the processes whose PULUMI_HOME is inside of `folder`; their ids."""
    mark, ended = f"PULUMI_HOME={folder}/".encode(), []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if any(one.startswith(mark) for one in (process / "environ").read_bytes().split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)
                ended.append(int(process.name))
        except OSError:
            # It has ended meanwhile, or belongs to somebody else.
            continue
    return ended
