"""A writer or a holder of the lock that is killed at any moment leaves an old file or a new one, and a free lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node_setup.agent import owned
from node_setup.agent.host import Host
from node_setup.agent.run import lock
from node_setup.agent.run.apply import sweep
from node_setup.agent.run.lock import BusyError, NoLockError, held
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
from node_setup.agent.run.lock import held
with held(Host(sys.argv[1]), 1.0):
    print("held", flush=True)
    time.sleep(3600)
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
def test_a_writer_killed_at_any_moment_leaves_whole_files_and_the_next_apply_tidies_up(tmp_path: Path) -> None:
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


def test_whoever_reads_a_file_while_it_is_written_reads_the_old_one_whole(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    host.write(owned.SYSCTL, "old\n" * LINES)
    with host.path(owned.SYSCTL).open() as reader:
        host.write(owned.SYSCTL, "new\n")
        assert reader.read() == "old\n" * LINES
    assert host.read(owned.SYSCTL) == "new\n"


def test_a_file_is_on_the_disk_before_its_name_is_and_its_name_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_lock_names_its_holder_and_goes_with_it(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    child = _child(_HOLDER, str(tmp_path))
    try:
        assert _said(child) == "held"
        with pytest.raises(BusyError, match=rf"pid {child.pid} since 20\d\d-.*; fix: "), held(host, 0.2):
            pass
    finally:
        _kill(child)
    with held(host, 0.0):
        assert (host.read(owned.LOCK) or "").startswith(f"pid {os.getpid()} since ")


def test_the_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child, pauses = _child(_HOLDER, str(tmp_path)), []
    assert _said(child) == "held"

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        _kill(child)

    monkeypatch.setattr(lock.time, "sleep", pause)
    with held(Host(str(tmp_path)), 300.0):
        assert pauses == [lock.POLL_S]


def test_only_root_may_open_the_lock(tmp_path: Path) -> None:
    with held(Host(str(tmp_path)), 0.0):
        assert (tmp_path / owned.LOCK.lstrip("/")).stat().st_mode & 0o777 == 0o600


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    with pytest.raises(NoLockError, match=r"Not a directory|File exists"), held(Host(str(tmp_path)), 0.0):
        pass
