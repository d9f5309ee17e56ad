"""A forked rank is as good as a started one: what a program can see of its process is the same, and so is how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import ENVIRONMENT, ForkServer
from trainer.node.launcher import LOOPBACK, Placement

pytestmark = pytest.mark.slow

_STATE = """
import os, signal, sys, torch
print(__name__, sys.argv[0].rpartition("/")[2].removesuffix(".py"), os.getcwd(), os.umask(0), os.nice(0), sys.flags)
print({n.name: signal.getsignal(n) for n in signal.Signals}.__repr__().replace(repr(signal.default_int_handler), "int"))
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.set_wakeup_fd(-1), len(os.listdir("/proc/self/task")))
# One more than there are is for the listing itself.
print(sorted(os.listdir("/proc/self/fd")), os.readlink("/proc/self/fd/0"), os.readlink("/proc/self/fd/1"))
print(sorted(one for one in os.environ.items() if one[0] != "MASTER_PORT"))
print(torch.get_num_threads(), torch.cuda.is_initialized(), torch.is_grad_enabled())
print(sys.stdin.read() == "", sys.stdout.isatty())
"""
_THREAD_AND_EXIT = """
import atexit, threading
atexit.register(print, "exit handler")
threading.Timer(0.05, print, ["thread"]).start()
print("main")
"""


@pytest.mark.parametrize(
    "code",
    [
        _STATE,
        _THREAD_AND_EXIT,
        "raise SystemExit(7)",
        "raise SystemExit('one line')",
        "raise ValueError('a traceback')",
        "import os, signal; print('said', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    ],
    ids=["state", "threads and exit handlers", "a number", "a line", "an exception", "a signal"],
)
def test_a_forked_rank_sees_and_ends_as_a_started_one(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    job = fork_server.start([code], 1, {"ONLY": "here"}, module="tests.fork_probe")
    forked = job.wait()
    log = tmp_path / "fresh"
    environment = Placement(1, (LOOPBACK, 1)).environments({**os.environ, "ONLY": "here", **ENVIRONMENT})[0]
    with log.open("wb") as out:
        started = subprocess.run(
            [sys.executable, "-m", "tests.fork_probe", code],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            check=False,
        ).returncode
    assert forked == [started]
    rank = job.ranks[0]
    said, expected = (
        text.replace(str(path), "LOG") for text, path in ((rank.said(), rank.log), (log.read_text(), log))
    )
    if "Traceback" in expected:
        said, expected = (text.strip().splitlines()[-1] for text in (said, expected))
    assert said == expected
