"""Locks on files: between processes, after a kill, and on a file that got another name."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lustrain.file_lock import hold_lock, try_lock

HOLDER = """
import sys, pathlib
from lustrain.file_lock import hold_lock
with hold_lock(pathlib.Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_lock_of_another_process_is_free_after_its_kill(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    words = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder, path.open("a+") as file:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert not try_lock(file.fileno())
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        holder.kill()
        holder.wait()
        assert try_lock(file.fileno())


def test_file_renamed_while_waiting_is_made_and_locked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole, flock = tmp_path / "part", tmp_path / "whole", fcntl.flock

    def rename_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.rename(whole)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", rename_first)
    with hold_lock(path) as descriptor:
        assert os.fstat(descriptor).st_ino == path.stat().st_ino != whole.stat().st_ino
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")
