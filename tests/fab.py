"""`fab` in this process: a command as its user gives it, without the second that its start takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from fabric.main import make_program

HOUSE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: object
    out: str
    err: str


Fab = Callable[..., Ended]


@pytest.fixture
def fab(capfd: pytest.CaptureFixture[str]) -> Fab:
    """`fab(*words)`, called in `folder`; with `environment` the command has that and nothing else of one.

    What the programs print that it calls counts too.
    """

    def call(*words: str, environment: Mapping[str, str] | None = None, folder: Path = HOUSE) -> Ended:
        capfd.readouterr()
        code: object = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LUSTRAIN_CLUSTER", raising=False)
            if environment is not None:
                for name in os.environ.keys() - environment.keys():
                    patch.delenv(name)
                for name, value in environment.items():
                    patch.setenv(name, value)
            patch.chdir(folder)
            # With pytest's own handlers there, Python would not print what is logged where nobody listens.
            patch.setattr(logging.getLogger(), "handlers", [])
            try:
                make_program().run(["fab", "-r", str(HOUSE), *words])
            except SystemExit as ended:
                code = ended.code or 0
        return Ended(code, *capfd.readouterr())

    return call
