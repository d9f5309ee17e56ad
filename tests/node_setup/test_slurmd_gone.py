"""A slurmd that does not come back from its restart is a failure of the tune, whatever is in place for its next start.

The host has one process and one unit; what systemd does when a service dies is left out but for the state that it shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from node_setup.agent.host import Done
from node_setup.agent.model import EXIT_FAILED, EXIT_IN_SYNC, Request
from node_setup.agent.run.outcome import fallen
from node_setup.agent.run.tune import tune
from node_setup.agent.wire.identity import Identity
from tests.node_setup.agents import BareHost

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         {0}              {0}              bytes
"""
ONLY = Request(only=("slurmd-limit.memlock",))


class SlurmHost(BareHost):
    """slurmd runs with low limits; `comes_back` tells whether it survives its restart."""

    def __init__(self, root: Path, comes_back: bool) -> None:
        super().__init__(root)
        self.comes_back, self.state = comes_back, "active"
        for path, text in (
            ("proc/stat", "cpu 0\n"),
            ("proc/1/comm", "systemd\n"),
            ("run/systemd/system/.keep", ""),
            ("etc/os-release", "ID=ubuntu\n"),
            ("proc/300/stat", "300 (slurmd) S 1 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 300 1 1\n"),
            ("proc/300/cmdline", "/usr/sbin/slurmd\0-D\0"),
            ("proc/300/limits", LIMITS.format("65536")),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def run(self, command: Sequence[str], timeout: float = 10.0, stdin: str = "") -> Done:
        if tuple(command[:2]) == ("systemctl", "show"):
            return Done(0, "\n".join(map(self._unit, command[command.index("--") + 1 :])), "")
        if tuple(command) == ("systemctl", "daemon-reload"):
            return Done(0, "", "")
        if tuple(command) == ("systemctl", "restart", "slurmd.service"):
            if self.comes_back:
                self.path("/proc/300/limits").write_text(LIMITS.format("unlimited"))
                return Done(0, "", "")
            shutil.rmtree(self.path("/proc/300"))
            self.state = "failed"
            return Done(1, "", "Job for slurmd.service failed because the control process exited with error code.")
        return super().run(command, timeout, stdin)

    def _unit(self, name: str) -> str:
        load, active = ("loaded", self.state) if name == "slurmd.service" else ("not-found", "inactive")
        return f"Id={name}\nLoadState={load}\nActiveState={active}\nUnitFileState=enabled\nResult=success\n"


def tuned(host: SlurmHost) -> tuple[list[dict[str, Any]], int]:
    result, code = tune(host, ONLY, Identity(), 0.0, lambda line: None)
    return [row for row in result["rows"] if row["part"] == "runtime"], code


def test_a_slurmd_that_is_gone_after_its_restart_is_failed_and_says_where_to_look(tmp_path: Path) -> None:
    (row,), code = tuned(SlurmHost(tmp_path, comes_back=False))
    assert (row["status"], code) == ("failed", EXIT_FAILED)
    assert "slurmd.service ran before and is failed now; fix: journalctl -u slurmd.service" in row["why"]
    assert "control process exited" in row["why"]


def test_a_slurmd_that_comes_back_is_changed(tmp_path: Path) -> None:
    (row,), code = tuned(SlurmHost(tmp_path, comes_back=True))
    assert (row["status"], code) == ("changed", EXIT_IN_SYNC)


def test_a_slurmd_that_had_failed_before_is_told_and_keeps_no_node_from_its_boot(tmp_path: Path) -> None:
    host = SlurmHost(tmp_path, comes_back=False)
    tuned(host)
    result, code = tune(host, ONLY, Identity(), 0.0, lambda line: None)
    assert code == EXIT_IN_SYNC
    assert [row["why"] for row in result["rows"] if row["setting"] == "slurmd-limit.memlock"] == [
        "in place; slurmd has failed (journalctl -u slurmd), and starts with it"
    ]


@pytest.mark.parametrize(
    ("before", "after", "gone"),
    [
        ("active", "failed", True),
        ("active", "inactive", True),
        ("active", "activating", True),
        ("active", "reloading", False),
        ("inactive", "failed", False),
        ("failed", "failed", False),
    ],
)
def test_only_what_ran_before_can_be_gone(before: str, after: str, gone: bool) -> None:
    looks = ({"services": {"a.service": {"active": state}}} for state in (before, after))
    assert fallen(*looks) == ({"a.service": after} if gone else {})


def test_what_systemd_does_not_tell_is_not_gone() -> None:
    assert fallen({"services": {"a.service": {"active": "active"}}}, {"services": None}) == {}
