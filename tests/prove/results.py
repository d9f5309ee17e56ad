"""A plug-in that writes one JSON line for each test as it ends, and shows all stacks on SIGUSR1; `--scene-results FILE`.

It needs nothing of the repository, so that a scene that cannot even be collected still says so.
"""

from __future__ import annotations

import faulthandler
import json
import signal
from pathlib import Path
from typing import TextIO

import pytest

_STACKS = pytest.StashKey[TextIO]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scene-results", type=Path, help="write a JSON line for each test into this file")


def pytest_configure(config: pytest.Config) -> None:
    file: Path = config.getoption("--scene-results")
    file.touch()
    config.pluginmanager.register(_Results(file))
    config.stash[_STACKS] = stacks = file.with_name("stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)


class _Results:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._worst: dict[str, tuple[str, float, str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": len(session.items)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test is what the worst of its three phases was."""
        outcome, seconds, why = self._worst.get(report.nodeid, ("passed", 0.0, ""))
        if outcome == "passed" and report.outcome != "passed":
            outcome, why = report.outcome, _why(report)
        self._worst[report.nodeid] = outcome, seconds + report.duration, why
        if report.when == "teardown":
            outcome, seconds, why = self._worst.pop(report.nodeid)
            row = {"test": report.nodeid, "outcome": outcome, "seconds": round(seconds, 1), "why": why}
            # What a test has measured, by pytest's `record_property`: for people, no verdict.
            self._write(row | ({"figures": dict(report.user_properties)} if report.user_properties else {}))

    def _write(self, row: dict[str, object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _why(report: pytest.TestReport) -> str:
    """The last line of a failure, the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().splitlines()[0]
