"""The lock outlives a killed agent for as long as a program runs that it had started to change the node."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from node_setup.agent.host import Host
from node_setup.agent.run.lock import BusyError, held

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
            apply(host, [Step("x", RUNTIME, "disk", "blank", "xfs", (Run(("sleep", "3")),))], print)
    host.run(["sleep", "20"])
"""


def killed_agent(root: Path, what: str) -> int:
    """Its process id; it is killed while a program of its own runs."""
    child = subprocess.Popen([sys.executable, "-c", _AGENT, str(root), what], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    while not Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text():
        time.sleep(0.01)
    child.kill()
    child.wait()
    child.stdout.close()
    return child.pid


@pytest.mark.slow
def test_what_a_killed_agent_had_started_to_change_the_node_is_waited_for(tmp_path: Path) -> None:
    pid = killed_agent(tmp_path, "changes")
    busy = rf"a program that a killed agent started still changes this node: pid {pid} since .*; fix: "
    with pytest.raises(BusyError, match=busy), held(Host(str(tmp_path)), 0.0):
        pass
    with held(Host(str(tmp_path)), 30.0):
        pass


def test_what_only_looks_holds_nobody_up_when_its_agent_is_killed(tmp_path: Path) -> None:
    killed_agent(tmp_path, "looks")
    # Not at once: a program that has just been forked has the descriptor until it is executed.
    with held(Host(str(tmp_path)), 10.0):
        pass
