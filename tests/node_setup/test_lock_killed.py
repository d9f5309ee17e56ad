"""The lock outlives a killed agent for as long as a program runs that it had started to change the node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from node_setup.agent.host import Host
from node_setup.agent.run import lock
from node_setup.agent.run.lock import BusyError, held
from tests.processes import alive, children_of, command_line, wait_until

_AGENT = """
import sys
from node_setup.agent.run.apply import apply
from node_setup.agent.host import Host
from node_setup.agent.run.lock import held
from node_setup.agent.model import RUNTIME, Run, Step
host, lend = Host(sys.argv[1]), sys.argv[2] == "changes"
with held(host, 1.0) as lock:
    print("begun", flush=True)
    if lend:
        with host.lending(lock):
            apply(host, [Step("x", RUNTIME, "disk", "blank", "xfs", (Run(("sleep", "3600"), 3600),))], print)
    host.run(["sleep", "3600"], 3600)
"""


def killed_agent(root: Path, what: str) -> tuple[int, int]:
    """Its process id, and that of the program of its own that runs on; end that."""
    child = subprocess.Popen([sys.executable, "-c", _AGENT, str(root), what], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    wait_until(lambda: [one for one in children_of(child.pid) if command_line(one) == "sleep 3600"])
    (program,) = children_of(child.pid)
    child.kill()
    child.wait()
    child.stdout.close()
    return child.pid, program


def test_what_a_killed_agent_had_started_to_change_the_node_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, program = killed_agent(tmp_path, "changes")
    busy = rf"a program that a killed agent started still changes this node: pid {pid} since .*; fix: "
    with pytest.raises(BusyError, match=busy), held(Host(str(tmp_path)), 0.0):
        pass
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        with suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)

    monkeypatch.setattr(lock.time, "sleep", pause)
    with held(Host(str(tmp_path)), 300.0):
        assert pauses


def test_what_only_looks_holds_nobody_up_when_its_agent_is_killed(tmp_path: Path) -> None:
    _, program = killed_agent(tmp_path, "looks")
    with held(Host(str(tmp_path)), 0.0):
        assert alive(program)
    os.kill(program, signal.SIGKILL)
