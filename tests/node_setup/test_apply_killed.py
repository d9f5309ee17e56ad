"""A writer or a holder of the lock that is killed at any moment leaves an old file or a new one, and a free lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from node_setup.agent import owned
from node_setup.agent.host import Host
from node_setup.agent.run import lock
from node_setup.agent.run.apply import sweep
from node_setup.agent.run.lock import BusyError, hold
from tests.processes import alive, children_of, command_line, wait_until
from tests.seeds import chance

KILLS = 40
LINES = 2000
_WRITER = """
import sys
from node_setup.agent.host import Host
from node_setup.agent import owned
host, number = Host(sys.argv[1]), 0
print("up", flush=True)
while True:
    number += 1
    for path in (owned.SYSCTL, owned.TUNING, owned.SLURMD):
        print("writes", flush=True)
        host.write(path, f"{number}\\n" * int(sys.argv[2]))
"""
_HOLDER = """
import sys, time
from node_setup.agent.host import Host
from node_setup.agent.run.lock import hold
with hold(Host(sys.argv[1]), 1.0):
    print("held", flush=True)
    time.sleep(3600)
"""
_AGENT = """
import sys
from node_setup.agent.run.apply import apply
from node_setup.agent.host import Host
from node_setup.agent.run.lock import hold
from node_setup.agent.model import RUNTIME, Run, Step
host, lend = Host(sys.argv[1]), sys.argv[2] == "changes"
with hold(host, 1.0) as lock:
    print("begun", flush=True)
    if lend:
        with host.lending(lock):
            apply(host, [Step("x", RUNTIME, "disk", "blank", "xfs", (Run(("sleep", "3600"), 3600),))], print)
    host.run(["sleep", "3600"], 3600)
"""


def _child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def _kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def _said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.slow
def test_killed_writer_leaves_whole_files_for_the_next_apply(tmp_path: Path) -> None:
    host, moments, left = Host(str(tmp_path)), chance("kills of a writer"), 0
    paths = (owned.SYSCTL, owned.TUNING, owned.SLURMD)
    for _ in range(KILLS):
        child = _child(_WRITER, str(tmp_path), str(LINES))
        assert _said(child) == "up"
        for _ in range(moments.randrange(10)):
            _said(child)
        _kill(child)
        for path in paths:
            text = host.read(path)
            lines = (text or "").splitlines()
            # Before the first write there is none, which is not an empty one.
            assert text is None or (len(lines) == LINES and len(set(lines)) == 1), f"{path} is half a file"
        left += len(sweep(host))
    assert left > 0, "no writer was killed in the middle of a write: this proves nothing"
    assert [str(path) for path in tmp_path.rglob("*.lustrain")] == []


def test_file_is_synced_before_its_name_and_its_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here; the order of the calls is what ext4 and XFS ask of whoever wants to find old or new after that."""
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("sync", "folder" if path.is_dir() else path.read_text()))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        calls.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    host = Host(str(tmp_path))
    host.write(owned.SYSCTL, "content")
    assert calls == [("sync", "content"), ("rename", Path(owned.SYSCTL).name), ("sync", "folder")]
    calls.clear()
    host.remove(owned.SYSCTL)
    assert calls == [("sync", "folder")]


def test_lock_is_roots_names_its_holder_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, child, pauses = Host(str(tmp_path)), _child(_HOLDER, str(tmp_path)), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        _kill(child)

    assert _said(child) == "held"
    with pytest.raises(BusyError, match=rf"pid {child.pid} since 20\d\d-.*; fix: "), hold(host, 0.0):
        pass
    monkeypatch.setattr("node_setup.agent.run.lock.time.sleep", pause)
    with hold(host, 300.0):
        assert pauses == [lock.POLL_S]
        assert (host.read(owned.LOCK) or "").startswith(f"pid {os.getpid()} since ")
        assert host.path(owned.LOCK).stat().st_mode & 0o777 == 0o600


def killed_agent(root: Path, what: str) -> tuple[int, int]:
    """Its process id, and that of the program of its own that runs on; end that."""
    child = _child(_AGENT, str(root), what)
    assert _said(child) == "begun"
    wait_until(lambda: [one for one in children_of(child.pid) if command_line(one) == "sleep 3600"])
    (program,) = children_of(child.pid)
    _kill(child)
    return child.pid, program


def test_program_of_a_killed_agent_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, program = killed_agent(tmp_path, "changes")
    busy = rf"a program that a killed agent started still changes this node: pid {pid} since .*; fix: "
    with pytest.raises(BusyError, match=busy), hold(Host(str(tmp_path)), 0.0):
        pass
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        with suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)

    monkeypatch.setattr("node_setup.agent.run.lock.time.sleep", pause)
    with hold(Host(str(tmp_path)), 300.0):
        assert pauses


def test_read_only_program_of_a_killed_agent_holds_no_lock(tmp_path: Path) -> None:
    _, program = killed_agent(tmp_path, "looks")
    with hold(Host(str(tmp_path)), 0.0):
        assert alive(program)
    os.kill(program, signal.SIGKILL)
