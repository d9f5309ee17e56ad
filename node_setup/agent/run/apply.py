"""The apply of a plan's steps: files first, then the running state.

What came of it is not judged here: facts are read again (`tune`), since programs that fail and exit 0 are many; Debian's
`sysctl -w` on a read-only key is one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

from lustrain.files import UNFINISHED
from node_setup.agent import owned
from node_setup.agent.host import Done, Host
from node_setup.agent.model import PERSISTED, Action, Copy, Put, Remove, Run, Step, Write

Key = tuple[str, str, str]
Log = Callable[[str], None]

BUSY_S, AGAIN_S = 60.0, 2.0
"""A program whose lock another one has is tried again for so long, at this interval."""
FAILED_PAUSE_S = 10.0
"""This is the pause between the tries of a program that may fail a few times."""
RELOADS = frozenset({("systemctl", "daemon-reload"), ("udevadm", "control", "--reload")})
"""These programs take files in: they run again after each further file, while other programs run once for all steps."""


def key(step: Step) -> Key:
    """Return what makes two steps, of two plans, the same step."""
    return (step.setting, step.part, step.target)


def apply(host: Host, steps: Iterable[Step], log: Log) -> dict[Key, str]:
    """Do the steps' actions in order, identical ones once, and return the reason of each step that failed; the others go on.

    The actions of one step build on each other: after the first that fails the step is left.
    """
    results: dict[Action, str | None] = {}
    troubles: dict[Key, str] = {}
    for step in sorted(steps, key=lambda step: step.part != PERSISTED):
        trouble = _do(host, step, results)
        if trouble is not None:
            troubles[key(step)] = trouble
        what = f"{step.setting} ({step.part}) {step.target}: {step.current} -> {step.wanted}"
        log(what if trouble is None else f"{what} FAILED: {trouble}")
    return troubles


def _do(host: Host, step: Step, results: dict[Action, str | None]) -> str | None:
    for action in step.actions:
        if action not in results:
            results[action] = perform(host, action)
            if isinstance(action, (Write, Remove)):
                for command in RELOADS:
                    for again in [
                        result for result in results if isinstance(result, Run) and result.command == command
                    ]:
                        del results[again]
        trouble = results[action]
        if trouble is not None:
            return trouble
    return None


def perform(host: Host, action: Action) -> str | None:
    """Do one action, and return None or in one line what went wrong."""
    if isinstance(action, Run):
        done = _run(host, action)
        return None if done.ok else f"{' '.join(action.command)}: {done.complaint}"
    try:
        if isinstance(action, Write):
            host.write(action.path, action.content, action.mode)
        elif isinstance(action, Copy):
            host.copy(action.source, action.path, action.mode)
        elif isinstance(action, Put):
            host.put(action.path, action.value)
        else:
            host.remove(action.path)
    except (OSError, ValueError) as error:
        return f"{action.path}: {_reason(error)}"
    return None


def _run(host: Host, action: Run) -> Done:
    for _ in range(action.tries - 1):
        done = _run_once(host, action)
        if done.ok:
            return done
        time.sleep(FAILED_PAUSE_S)
    return _run_once(host, action)


def _run_once(host: Host, action: Run) -> Done:
    began = time.monotonic()
    while True:
        done = host.run(action.command, action.timeout_s)
        busy = bool(action.busy) and not done.ok and action.busy in f"{done.out}{done.err}"
        if not busy or time.monotonic() - began > BUSY_S:
            return done
        time.sleep(AGAIN_S)


def sweep(host: Host, folders: Iterable[str] = ()) -> list[str]:
    """Remove what killed writers left beside our files, and return its names; only under the lock, or it may be a running
    writer's."""
    ours = {PurePosixPath(path) for path in (*owned.PATHS, owned.AGENT, owned.REPORT)}
    gone = []
    for folder in sorted({str(path.parent) for path in ours} | set(folders)):
        for name in host.names(folder):
            if _is_unfinished(name):
                trouble = perform(host, Remove(f"{folder}/{name}"))
                gone.append(f"{folder}/{name}" + (f": {trouble}" if trouble else ""))
    return gone


def _is_unfinished(name: str) -> bool:
    """Recognise `.NAME.XXXXXXXX.lustrain`, as Host names a file that it writes."""
    parts = name.split(".")
    token = parts[-2] if len(parts) >= 4 else ""
    return (
        name.startswith(".") and name.endswith(UNFINISHED) and len(token) == 8 and set(token) <= set("0123456789abcdef")
    )


def _reason(error: Exception) -> str:
    return (
        os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error) or type(error).__name__
    )
