"""Small contexts, a watch that remembers, and buildx against the lab's engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from images.model import Context, Plan, Step

MTIME = 1_700_000_000


class Silent:
    """Prints nothing."""

    def started(self, name: str) -> None: ...

    def ended(self, step: Step) -> None: ...

    def log(self, name: str, text: str) -> None: ...

    def moved(self, name: str, done: int, total: int) -> None: ...


class Remembering:
    """A Watch."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.steps: list[Step] = []
        self.logs: list[tuple[str, str]] = []
        self.moves: list[tuple[str, int, int]] = []

    def started(self, name: str) -> None:
        self.begun.append(name)

    def ended(self, step: Step) -> None:
        self.steps.append(step)

    def log(self, name: str, text: str) -> None:
        self.logs.append((name, text))

    def moved(self, name: str, done: int, total: int) -> None:
        self.moves.append((name, done, total))


def context(folder: Path, dockerfile: str, **files: str) -> Context:
    """A staged context; times and modes are equal, as in a real one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"Dockerfile": dockerfile, **files}.items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o644)
        os.utime(path, (MTIME, MTIME))
    return Context(folder, {})


def plan(*tags: str, target: str = "small", **more: Any) -> Plan:
    return Plan(target=target, platform="linux/amd64", dockerfile="Dockerfile", tags=tags, **more)


def named(steps: tuple[Step, ...], text: str) -> Step:
    """The one step whose name has that text."""
    found = [step for step in steps if text in step.name]
    assert len(found) == 1, [step.name for step in steps]
    return found[0]


def docker_that_says(folder: Path, script: str) -> dict[str, str]:
    """The environment of a docker command that is this shell script and fails in all that it does not do."""
    (folder / "bin").mkdir()
    (folder / "bin/docker").write_text(f"#!/bin/sh\n{script}\nexit 1\n")
    (folder / "bin/docker").chmod(0o755)
    return {"PATH": f"{folder}/bin:/usr/bin:/bin"}
