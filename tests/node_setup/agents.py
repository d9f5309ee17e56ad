"""The packed agent and the interpreters it has to run under; a machine without programs for what runs in this process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_setup.agent.host import NO_PROGRAM, Done, Host

VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")


class BareHost(Host):
    """A machine under a folder that has no programs: what would run one for real finds none. `ran` holds what was asked."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.ran: list[tuple[str, ...]] = []

    def which(self, program: str) -> str | None:
        return None

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        self.ran.append(tuple(command))
        return Done(NO_PROGRAM, "", f"{command[0]}: No such file or directory")


def silent(line: str) -> None:
    """A log that nobody reads."""


def run(
    agent: Path, *arguments: str, stdin: str | bytes = "", python: str = sys.executable, **more: Any
) -> subprocess.CompletedProcess[str]:
    """The packed agent as a process of its own."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    command = [python, "-I", "-S", str(agent), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=300, **more)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def oldest() -> Path:
    """The oldest Python that the agent runs under and this machine has."""
    found = (interpreter(f"3.{minor}") for minor in range(9, sys.version_info.minor))
    return Path(next((path for path in found if path is not None), sys.executable)).resolve()


def interpreter(version: str) -> str | None:
    """Path of a Python of that minor version: on PATH, or installed by pyenv; None where there is none that starts."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in [*map(str, installed), shutil.which(f"python{version}")]:
        if candidate is not None and _says(candidate) == version:
            return candidate
    return None


def _says(path: str) -> str | None:
    done = subprocess.run([path, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False)
    found = re.match(r"\d+\.\d+", done.stdout)
    return found[0] if done.returncode == 0 and found else None
