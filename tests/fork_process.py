"""The process that has imported torch and forks: `python -m tests.fork_process`, driven by `tests.fork_server.ForkServer`.

It reads one JSON request per line and answers with lines of JSON. It never runs a torch operation and has one thread, so its
children begin as a fresh process would. It adopts what its children leave behind (PR_SET_CHILD_SUBREAPER), so a process that
outlives its rank cannot hide.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Ranks begin with these held and let them go once they listen, as under `trainer.node.launcher`."""
IMPORTED = (
    "trainer.train",
    "trainer.tasks.language_model",
    "trainer.storage.s3",
    "trainer.storage.crt",
    "torch._dynamo",
)
"""torch imports the last of them itself, seconds long, when the first optimizer is made."""


def serve() -> None:
    """Fork as asked, report what ends, until standard input closes."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run, and a child would inherit one: which module starts them?")

    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # Unbuffered: what is left in a buffer would not make `poll` return.
    requests = open(0, "rb", buffering=0)  # noqa: SIM115
    _say("ready", None)
    while True:
        readable = ready([requests.fileno(), wake], None)
        if wake in readable:
            os.read(wake, 1 << 12)
            _reap()
        if requests.fileno() in readable:
            line = requests.readline()
            if not line:
                return
            request = json.loads(line)
            _say("started", [_fork(request, *rank, (wake, waker)) for rank in request["ranks"]])


def ready(descriptors: Sequence[int], wait_s: float | None) -> list[int]:
    """Those that can be read. Not select(2): it takes no descriptor over 1023, and a long test session may have more."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [found for found, _ in poll.poll(None if wait_s is None else wait_s * 1000)]


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say("ended", [pid, os.waitstatus_to_exitcode(status)])


def _fork(request: dict[str, Any], environment: dict[str, str], log: str, own: tuple[int, ...]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    pid = os.fork()
    if not pid:
        _be_rank(request, environment, log, own)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    return pid


def _be_rank(request: dict[str, Any], environment: dict[str, str], log: str, own: tuple[int, ...]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in own:
            os.close(descriptor)
        with open(log, "wb") as out, open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["folder"])
        _seed()
        if request["module"] != "trainer":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        code = _run(request["module"], request["arguments"])
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def _seed() -> None:
    """As a fresh import does; Python's own `random` sees to itself after a fork."""
    import numpy
    import torch

    torch.default_generator.seed()
    numpy.random.seed()


def _run(module: str, arguments: list[str]) -> int:
    """`python -m MODULE ARGUMENTS` up to its end; the exit code."""
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _say(kind: str, value: Any) -> None:
    os.write(1, json.dumps([kind, value]).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    serve()
